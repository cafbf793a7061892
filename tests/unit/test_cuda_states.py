"""How the states of a GPU's target are made: the order of calls, over stand-ins for SGLang's parts."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_nightjar.speculation import cuda_states, cuda_worker
from sglang_nightjar.speculation.cuda_worker import CudaChainDraftWorker, chain_tree

SIZES = (1, 2, 4, 8)
BYTES_PER_ROW = 10


class Backend:
    """An attention backend, which keeps the width it is made under."""

    def __init__(self, runner: "ModelRunner") -> None:
        self.width = runner.decode_num_tokens_per_req()
        self.steps = get_spec().speculative_num_steps
        runner.device.take(1000)


class GraphRunner:
    """`DecodeCudaGraphRunner` as far as it decides what to capture (`__init__`)."""

    def __init__(
        self, runner: "ModelRunner", *, attn_backend: Any, speculative_num_steps: int, speculative_num_draft_tokens: int
    ) -> None:
        self.attn_backend = attn_backend
        self.captured_req_width = runner.decode_num_tokens_per_req(speculative_num_draft_tokens)
        self.capture_forward_mode = ForwardMode.DECODE
        if runner.spec_algorithm.is_speculative():
            assert not runner.is_draft_worker, "This should not happen"
            self.capture_forward_mode = ForwardMode.TARGET_VERIFY
        self.capture_bs = list(cuda_states.get_exec().graph.cuda_graph_config.decode.bs)
        runner.device.take(BYTES_PER_ROW * self.captured_req_width * sum(self.capture_bs))


class Device:
    def __init__(self) -> None:
        self.free = 10_000_000

    def take(self, nbytes: int) -> None:
        self.free -= nbytes


class ModelRunner:
    def __init__(self, device: Device, *, draft: bool = False) -> None:
        self.device, self.is_draft_worker = device, draft
        self.spec_algorithm = SpeculativeAlgorithm.STANDALONE
        self.init_new_workspace = False
        self.attn_backend = Backend(self)
        self.decode_cuda_graph_runner: Any = "eager"

    def decode_num_tokens_per_req(self, num_draft_tokens: int | None = None) -> int:
        if not self.spec_algorithm.is_speculative():
            return 1
        return num_draft_tokens or int(get_spec().speculative_num_draft_tokens)

    def _get_attention_backend(self, init_new_workspace: bool = False) -> Backend:
        self.init_new_workspace = init_new_workspace
        return Backend(self)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    decode = SimpleNamespace(bs=list(SIZES))
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=decode))
    monkeypatch.setattr(cuda_states, "get_exec", lambda: SimpleNamespace(graph=graph))
    monkeypatch.setattr(cuda_states, "DecodeCudaGraphRunner", GraphRunner)
    monkeypatch.setattr(cuda_states, "graphs_wanted", lambda: True)
    monkeypatch.setattr(cuda_states, "get_batch_sizes_to_capture", lambda runner, width: (decode.bs, []))
    with get_context().override_server_args(speculative_num_steps=3, speculative_num_draft_tokens=4):
        yield Device()
        assert decode.bs == list(SIZES), "the configured sizes are not put back"
        assert (get_spec().speculative_num_steps, get_spec().speculative_num_draft_tokens) == (3, 4)


def started(device: Device, *, graphs: bool = True) -> ModelRunner:
    """A target as SGLang's start leaves it."""
    target = ModelRunner(device)
    target.decode_cuda_graph_runner = (
        GraphRunner(target, attn_backend=target.attn_backend, speculative_num_steps=3, speculative_num_draft_tokens=4)
        if graphs
        else None
    )
    return target


def test_one_state_for_each_gamma(device: Device) -> None:
    target = started(device)
    reach = {0: SIZES, 1: (1, 2), 3: SIZES}
    before = device.free
    states = cuda_states.build_states(target, 3, reach, lambda: device.free)
    assert states.gammas == (0, 1, 3) and states.in_force.gamma == 3
    assert states.nbytes == before - device.free == 2 * 1000 + BYTES_PER_ROW * (1 * 15 + 2 * 3)
    assert (target.spec_algorithm, target.init_new_workspace) == (SpeculativeAlgorithm.STANDALONE, False)
    for gamma, mode in ((0, ForwardMode.DECODE), (1, ForwardMode.TARGET_VERIFY), (3, ForwardMode.TARGET_VERIFY)):
        states.before_verification(gamma)
        runner = target.decode_cuda_graph_runner
        assert runner.attn_backend is target.attn_backend
        assert runner.attn_backend.width == runner.captured_req_width == gamma + 1
        assert (runner.capture_forward_mode, tuple(runner.capture_bs)) == (mode, reach[gamma])
        assert runner.attn_backend.steps == gamma
    states.before_prefill()
    assert target.attn_backend.width == 4


def test_without_graphs_there_are_backends_all_the_same(device: Device) -> None:
    """The width of a verification is the backend's, also where it runs eagerly."""
    target = started(device, graphs=False)
    states = cuda_states.build_states(target, 3, {0: (), 2: (), 3: ()}, lambda: device.free)
    for gamma in (2, 0, 3):
        states.before_verification(gamma)
        assert target.decode_cuda_graph_runner is None and target.attn_backend.width == gamma + 1


def test_what_is_captured_is_checked(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that does not take itself for a plain server's captures verifications, and is found out."""
    target = started(device)
    with pytest.raises(AssertionError, match="gamma 0 were captured in TARGET_VERIFY mode"):
        cuda_states.capture(target, target.attn_backend, 0, SIZES)
    with pytest.raises(RuntimeError, match="out of memory"), cuda_states.without_speculation(target):
        raise RuntimeError("out of memory")
    assert target.spec_algorithm is SpeculativeAlgorithm.STANDALONE


@pytest.fixture
def draft(device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = CudaChainDraftWorker.__new__(CudaChainDraftWorker)
    made.draft_runner = ModelRunner(device, draft=True)
    made.speculative_num_steps = 3
    made._specialized_graph_memory_usage = {}
    monkeypatch.setattr(cuda_worker, "free_bytes", lambda runner: device.free)
    return made


def test_the_draft_has_plain_decodes_only(draft: Any, device: Device) -> None:
    draft._capture_cuda_graphs()
    runner = draft.draft_runner.decode_cuda_graph_runner
    assert (runner.capture_forward_mode, runner.captured_req_width, runner.capture_bs) == (
        ForwardMode.DECODE, 1, list(SIZES),
    )  # fmt: skip
    assert draft.draft_runner.spec_algorithm is SpeculativeAlgorithm.STANDALONE
    assert draft.graph_bytes == BYTES_PER_ROW * sum(SIZES)
    assert draft.cuda_graph_runner is draft.cuda_graph_runner_for_draft_extend is None


def test_a_single_draft_needs_no_decode(draft: Any) -> None:
    draft.speculative_num_steps = 1
    draft._capture_cuda_graphs()
    assert draft.draft_runner.decode_cuda_graph_runner == "eager" and draft.graph_bytes == 0


def test_chain_tree() -> None:
    """As `EagleDraftWorkerBase._rebuild_topk1_chain_buffers` makes them."""
    parents, scores = chain_tree(3, 2, "cpu")
    assert parents.tolist() == [[-1, 0, 1]] * 2 and scores.tolist() == [[0, 1, 2]] * 2
    parents, scores = chain_tree(1, 2, "cpu")
    assert parents.shape == (2, 0) and scores.tolist() == [[0], [0]]
