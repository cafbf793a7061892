"""The parts of `gpu_check.py` that need a GPU and no server: arena, reload, kernels, captured graphs."""

import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_rows import FAILED, OK, Row
from kernel_cases import ROWS, bench_catchup, bench_draft_lens, bench_kv_relocate, bench_set_valid, copy_bandwidth

from sglang_nightjar.kernels.kv_relocate import kv_relocate, relocate_reference
from sglang_nightjar.memory.arena import CommitError, Regions
from sglang_nightjar.memory.background import Background, Pace
from sglang_nightjar.memory.device_cuda import CudaDevice
from sglang_nightjar.memory.draft_store import DraftStore

GIB = 1 << 30
_STEP_MATRIX = 4096  # of the work that stands for decode steps while weights come back


def check_arena(ordinal: int) -> list[Row]:
    """Memory committed, handed from one arena to another, refused and given back."""
    device = CudaDevice(ordinal)
    giver, taker = device.arena(GIB), device.arena(GIB)
    unit, addresses = device.granularity, (giver.address, taker.address)
    rows = []
    seconds = timed(lambda: giver.commit(0, GIB))
    rows.append(rated("arena", f"1 GiB committed and zeroed, units of {unit >> 10} KiB", seconds, GIB))
    whole = giver.tensor(0, (GIB,), torch.uint8)
    require(not bool(whole.any()), "committed memory is not zero")
    whole.fill_(7)
    free = torch.cuda.mem_get_info(ordinal)[0]
    device.mark()
    seconds = timed(lambda: giver.decommit(0, GIB // 2))
    rows.append(rated("arena", "half of it taken away", seconds, GIB // 2))
    seconds = timed(lambda: taker.commit(0, GIB // 2))
    lost = free - torch.cuda.mem_get_info(ordinal)[0]
    held = lost < 64 << 20  # what others take meanwhile is no fault of ours
    figure = f"{seconds * 1e3:.1f} ms; the device has {lost >> 20} MiB less free than before"
    rows.append(Row("arena", "and mapped into another arena", OK if held else FAILED, figure, {"seconds": seconds}))
    require(bool((whole[GIB // 2 :] == 7).all()), "memory that stayed has changed")
    require(not bool(taker.tensor(0, (GIB // 2,), torch.uint8).any()), "handed-over memory is not zero")
    giver.commit(0, GIB // 2)
    require(bool((whole[GIB // 2 :] == 7).all()) and not bool(whole[: GIB // 2].any()), "a commit reached too far")
    require((giver.address, taker.address) == addresses, "an arena has moved")
    rows.append(Row("arena", "contents that stay, zeros that come, addresses", OK))
    rows.append(check_refusal(device, ordinal))
    torch.cuda.synchronize(ordinal)
    for arena in (giver, taker):
        arena.close()
    held_bytes = device.pool.spare
    seconds = timed(device.pool.trim)
    rows.append(rated("arena", "everything given back to the device", seconds, held_bytes))
    return rows


def check_refusal(device: CudaDevice, ordinal: int) -> Row:
    """More than the device has: refused, and nothing is kept of it."""
    total = torch.cuda.get_device_properties(ordinal).total_memory
    arena = device.arena(total + GIB)
    before = torch.cuda.mem_get_info(ordinal)[0]
    begin = time.perf_counter()
    try:
        arena.commit(0, arena.size)
    except CommitError as error:
        seconds = time.perf_counter() - begin
        lost = before - torch.cuda.mem_get_info(ordinal)[0]
        good = arena.committed == 0 and lost < 64 << 20
        figure = f"{seconds:.2f} s; {str(error).rsplit(': ', 1)[-1]}; {lost >> 20} MiB kept"
        row = Row("arena", "more than the device has", OK if good else FAILED, figure, {"seconds": seconds})
    else:
        row = Row("arena", "more than the device has", FAILED, "it was given")
    arena.close()
    return row


def check_reload(ordinal: int, nbytes: int) -> list[Row]:
    """Weights out and back: bandwidth by chunk size, bytes, addresses, and what a running stream notices."""
    device = CudaDevice(ordinal)
    where = on_gpu(ordinal)
    model = torch.nn.ModuleList(
        torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device=where) for _ in range(nbytes >> 25)
    )
    store = DraftStore(model, device, shared_with=torch.nn.Module())
    addresses = [weight.data_ptr() for weight in model.parameters()]
    plain = pinned_bandwidth(where)
    rows = [Row("reload", "one pinned copy by torch", OK, f"{plain / 1e9:.1f} GB/s", {"bytes_per_s": plain})]
    for chunk in (16 << 20, 64 << 20, store.nbytes):
        device.mark()
        store.release()
        seconds = timed(lambda chunk=chunk: store.reload(chunk, nothing))
        check = f"{store.nbytes >> 20} MiB in chunks of {chunk >> 20} MiB, with memory and checksum"
        rows.append(rated("reload", check, seconds, store.nbytes))
    store.verify()
    same = [weight.data_ptr() for weight in model.parameters()] == addresses
    rows.append(Row("reload", "checksum and addresses", OK if same else FAILED))
    rows.append(check_pace(device, store, where))
    return rows


def check_pace(device: CudaDevice, store: DraftStore, where: torch.device) -> Row:
    """Steps of a stream while a thread reloads, one chunk a step: how much longer they take."""
    a, b = (torch.randn(_STEP_MATRIX, _STEP_MATRIX, dtype=torch.bfloat16, device=where) for _ in range(2))
    out = torch.empty_like(a)

    def step() -> float:
        begin = time.perf_counter()
        for _ in range(20):
            torch.mm(a, b, out=out)
        torch.cuda.current_stream(where).synchronize()
        return time.perf_counter() - begin

    alone = sorted(step() for _ in range(30))[15]
    device.mark()
    store.release()

    def reload(pace: Pace) -> None:
        store.reload(16 << 20, pace.take)

    work = Background("gpu-check-reload", reload)
    together = []
    while work.running:
        work.pace.give(lambda: None)
        together.append(step())
    require(work.failure is None, f"the reload failed: {work.failure}")
    store.verify()
    beside = sorted(together)[len(together) // 2]
    values = {"alone_s": alone, "beside_s": beside, "worst_s": max(together)}
    alone_ms, beside_ms, worst_ms = (seconds * 1e3 for seconds in values.values())
    figure = f"{alone_ms:.2f} ms alone, {beside_ms:.2f} ms beside it ({len(together)} steps); worst {worst_ms:.2f}"
    return Row("reload", "a step, median", OK, figure, values)


def check_kernels(ordinal: int) -> list[Row]:
    """Every case compares its result; figures are bandwidth, against a copy's."""
    device = on_gpu(ordinal)
    copy = copy_bandwidth(device, 512 << 20)
    rows = [Row("kernels", "device-to-device copy", OK, f"{copy / 1e9:.0f} GB/s", {"bytes_per_s": copy})]
    cases = [
        *bench_kv_relocate(device, 8, 24_000, (1_000, 10_000), ROWS[:2]),
        *bench_draft_lens(device, ((128, 4_096),)),
        *bench_set_valid(device),
        *bench_catchup(device, ((128, 64), (8, 4_096))),
    ]
    for case in cases:
        rate = case["bytes"] / case["device_us"] * 1e6
        figure = f"{case['device_us']:.1f} us, {rate / 1e9:.1f} GB/s, {rate / copy:.2f} of a copy"
        values = {"device_us": case["device_us"], "bytes_per_s": rate, "of_copy": rate / copy}
        rows.append(Row("kernels", f"{case['kernel']}: {case['case']}", OK, figure, values))
    rows.append(check_moves(device))
    return rows


def check_moves(device: torch.device) -> Row:
    """Contractions, chains and cycles, in odd layouts, byte for byte as the reference moves them on the CPU."""
    generator, tried = torch.Generator().manual_seed(3), 0
    for width in (1, 3, 16, 96, 1101):
        for _ in range(8):
            slots = int(torch.randint(2, 300, (1,), generator=generator))
            host = [
                torch.randint(0, 256, (slots, width + index), dtype=torch.uint8, generator=generator)
                for index in range(3)
            ]
            found = [buffer.to(device, copy=True) for buffer in host]
            dst = torch.randperm(slots, generator=generator)[: slots // 2]
            src = torch.randint(0, slots, (len(dst),), generator=generator)
            kv_relocate(found, src, dst)
            relocate_reference(host, src, dst)
            for moved, expected in zip(found, host, strict=True):
                require(torch.equal(moved.cpu(), expected), f"rows of {expected.shape[1]} bytes moved wrongly")
            tried += 1
    return Row("kernels", "kv_relocate: any moves, odd rows", OK, f"{tried} random cases as on the CPU")


def check_graph(ordinal: int) -> list[Row]:
    """A graph that reads weights and KV rows, replayed after their memory went and other memory came."""
    device = CudaDevice(ordinal)
    where = on_gpu(ordinal)
    model = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.float32, device=where)
    store = DraftStore(model, device, shared_with=torch.nn.Module())
    rows_max, row_bytes = 8192, 2048
    regions = Regions(
        device.arena(Regions.reserved_bytes(2, rows_max, row_bytes, device.granularity)), 2, rows_max, row_bytes
    )
    regions.resize(4096)
    kv = [regions.tensor(index, (512,), torch.float32) for index in range(2)]
    x, slots = torch.randn(8, 1024, device=where), torch.tensor([5, 900, 4000], device=where)
    addresses = [tensor.data_ptr() for tensor in (model.weight, *kv)]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        kv[1][slots] = kv[0][slots] * 2
        return x @ model.weight.t(), kv[1][slots]

    graph, (product, moved) = capture(run)
    graph.replay()
    expected = product.clone()
    other = device.arena(64 << 20)
    for turn in range(3):
        device.mark()
        store.release()
        regions.resize(0)
        other.commit(0, other.size)  # takes the memory that lay under the weights and the KV rows
        store.reload(16 << 20, nothing)
        regions.resize(4096)
        device.mark()
        other.decommit(0, other.size)
        kv[0][slots] = float(turn + 1)
        graph.replay()
        torch.cuda.current_stream(where).synchronize()
        require([tensor.data_ptr() for tensor in (model.weight, *kv)] == addresses, "an address has changed")
        require(torch.equal(product, expected), "the graph read other weights")
        require(bool((moved == 2 * (turn + 1)).all()), "the graph read or wrote other KV rows")
    return [Row("graph", "a captured graph over weights and KV that went and came back", OK, "3 times, same addresses")]


def on_gpu(ordinal: int) -> torch.device:
    """torch's name of the device."""
    return torch.device("cuda", ordinal)


def capture(run: Callable[[], Any]) -> tuple[Any, Any]:
    """`run` as a CUDA graph, and the tensors it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def pinned_bandwidth(where: torch.device, nbytes: int = 512 << 20) -> float:
    """Bytes per second from pinned memory to the device, one copy."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=where)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(where).synchronize()

    return nbytes / min(timed(copy) for _ in range(4))


def rated(part: str, check: str, seconds: float, nbytes: int) -> Row:
    """A row for bytes done in a time."""
    rate = nbytes / seconds
    return Row(
        part, check, OK, f"{seconds * 1e3:.1f} ms, {rate / 1e9:.1f} GB/s", {"seconds": seconds, "bytes_per_s": rate}
    )


def timed(work: Callable[[], Any]) -> float:
    """Seconds, of work that waits for what it begins."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def require(kept: bool, otherwise: str) -> None:
    """`RuntimeError` where something is wrong; an assertion would go under `python -O`."""
    if not kept:
        raise RuntimeError(otherwise)


def nothing() -> None:
    """Chunks may be copied as fast as they can."""
