"""A set-up emulated at many times its speed: the real scheduler, pools and planner over a device on paper.

The same requests go through servers of four policies, one after the other; the last one's pool is small at first, and
its draft is driven out and back meanwhile, so that slots are relocated. A token follows from the KV of its context: the
answers are equal only if no KV slot was ever lost, stale or misplaced.
"""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from elastic import memory, settle
from serving import Server, serve
from workload import Request, assert_pool_empties, assert_same, histogram, nightjar, run_all

from sglang_nightjar.emulate.scale import scaled
from sglang_nightjar.emulate.vocabulary import FIRST, FIRST_DOMAIN, VOCABULARY
from sglang_nightjar.memory.arena_posix import PAGE
from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.setups import SET_UPS

NAME, SPEED, GAMMA = "4090-r1-qwen-7b", 20, 3
SET_UP = SET_UPS[NAME]
ALPHAS = (0.9, 0.3)  # of requests with the first tag, and with the second
SWITCHING, DRIVEN = "random:3", "nightjar"  # the latter's draft moves
POLICIES = ("off", f"static:{GAMMA}", SWITCHING, DRIVEN)
SMALL = 4096  # slots of its pool while the draft is there: fewer than the load's cached prefixes take
CHECK_EVERY_STEP = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}  # slow, with 100,000 slots


pytestmark = pytest.mark.timeout(1500)  # four starts, one after the other, on whatever else the machine does


class Run(NamedTuple):
    """What one server gave."""

    answers: list[Any]
    emulated: dict[str, Any]
    nightjar: dict[str, Any] | None
    slots: int


def requests(count: int = 200) -> list[Request]:
    """Short ones, a domain tag in front of each; a third goes on from a shared prefix."""
    rng = random.Random(7)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(FIRST, len(VOCABULARY)) for _ in range(number)]

    shared = tokens(120)
    prompts = [
        [FIRST_DOMAIN + index % 2, *(shared[: rng.randrange(20, 120)] if index % 3 == 0 else [])]
        + tokens(rng.randrange(1, 80))
        for index in range(count)
    ]
    return [Request(prompt, rng.randrange(8, 40)) for prompt in prompts]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """By policy; each server is ended before the next one starts."""
    spec = tmp_path_factory.mktemp("acceptance") / "spec.json"
    spec.write_text(json.dumps({"domains": [{"alpha": alpha, "concentration": 1e9} for alpha in ALPHAS]}))
    return {policy: run(policy, spec) for policy in POLICIES}


def run(policy: str, spec: Path) -> Run:
    words: list[Any] = ["--nightjar-emulate", NAME, "--nightjar-emulate-speed", SPEED, "--nightjar-policy", policy]
    words += ["--nightjar-emulate-acceptance", spec, "--nightjar-cooldown-s", 3600, "--max-running-requests", 64]
    driven = policy == DRIVEN
    if driven:
        words += ["--max-total-tokens", SMALL]
    elif policy == SWITCHING:
        words += ["--nightjar-elastic", "on"]  # by hand only; it says what its pool would be without the draft
    with serve(*words, environ=CHECK_EVERY_STEP if driven else None) as server:
        check_clients(server)
        answers = run_driven(server) if driven else run_all(server, requests(), at_once=24)
        assert_pool_empties(server)
        state = server.get("/server_info")["internal_states"][0]
        slots = state["memory_usage"]["token_capacity"]
        return Run(answers, state["emulated"], state.get("nightjar"), slots)


MEASURED = {
    "name": "a box",
    "source": "by hand",
    "batches": [1, 32],
    "gammas": [0, 2],
    "seconds": [[0.08, 0.2], [0.1, 0.4]],
    "prefill_token_s": 1e-3,
    "prefill_step_s": 0.05,
    "draft_token_s": 1e-3,
    "slots_resident": 9000,
    "slots_evicted": 12_000,
}


def run_driven(server: Server) -> list[Any]:
    """The answers, while the draft leaves and returns as often as it can.

    Whether it meets a tail in use, and requests that go on, is chance: the load is repeated until it has."""
    answers: list[Any] = []
    for _ in range(10):
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(run_all, server, requests(), at_once=24)
            while not load.done():
                settle(server, "EVICTED")
                assert memory(server)["slots"] > 3 * SMALL
                time.sleep(0.5)  # it fills
                settle(server, "RESIDENT")
                assert memory(server)["slots"] == SMALL
        if answers:
            assert_same(load.result(), answers)
        answers = load.result()
        own = nightjar(server)
        if min(own["memory"]["evictions"] - 1, own["memory"]["moved_slots"], own["catchup_tokens"]) > 0:
            break
    return answers


def check_clients(server: Server) -> None:
    """Text, chat, sampling and logprobs go the ordinary ways."""
    text = server.generate("To be, or not", max_new_tokens=12)
    drawn = server.generate("To be, or not", max_new_tokens=12, temperature=1.0)
    assert drawn["output_ids"] == text["output_ids"] and len(text["text"]) == text["meta_info"]["completion_tokens"]
    chat = {"model": f"emulated/{NAME}", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    answer = server.post("/v1/chat/completions", chat)
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": len("user: hi\nassistant: "), "completion_tokens": 5}
    scored = server.generate("abcdef", max_new_tokens=3, request={"return_logprob": True, "logprob_start_len": 0})
    assert len(scored["meta_info"]["input_token_logprobs"]) == 6
    assert all(value > -0.01 for value, *_ in scored["meta_info"]["output_token_logprobs"])


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_outputs_are_those_without_speculation(runs: dict[str, Run], policy: str) -> None:
    assert_same(runs[policy].answers, runs["off"].answers)


def test_capacities_are_the_set_up_s(runs: dict[str, Run]) -> None:
    assert runs["off"].slots == SET_UP.slots(False)
    assert {runs[policy].slots for policy in POLICIES[1:3]} == {SET_UP.slots(True)}
    switching = runs[SWITCHING].nightjar
    assert switching is not None
    evicted = switching["memory"]["slots_evicted"]
    assert 0 <= SET_UP.slots(False) - evicted <= PAGE // (scaled(SET_UP.target).kv_bytes // 2) + 1, "a page at most"


def test_the_draft_agrees_as_scheduled(runs: dict[str, Run]) -> None:
    """Of verifications at gamma 3, alpha ** i accept i drafts or more: the tag in the prompt says which alpha."""
    for tag, alpha in enumerate(ALPHAS):
        counts = histogram(runs[f"static:{GAMMA}"].answers[tag::2], GAMMA)
        total = sum(counts)
        for place in range(1, GAMMA + 1):
            share = sum(counts[place:]) / total
            # Drafts beyond a request's end count as not accepted: a few percent of so short answers.
            assert abs(share - alpha**place) < 0.06, f"{share:.3f} of {total} accepted {place} drafts, alpha {alpha}"


def test_the_draft_left_and_returned(runs: dict[str, Run]) -> None:
    own = runs[DRIVEN].nightjar
    assert own is not None
    moved, work = own["memory"], runs[DRIVEN].emulated["work"]
    assert moved["reloads"] == moved["evictions"] >= 2 and moved["failures"] == 0, moved
    assert work["reload"]["seconds"] == pytest.approx(moved["reloads"] * StepCost(SET_UP).reload_s())
    assert work["evict"]["count"] == moved["evictions"]
    assert moved["moved_slots"] > 0, "nothing lived in the tail when it had to go"
    assert work["relocate"]["seconds"] == pytest.approx(StepCost(SET_UP).relocate_s(moved["moved_slots"]))
    assert own["catchup_tokens"] > 0, "requests that went on while the draft was away are caught up with"


def test_time_is_charged_for_what_ran(runs: dict[str, Run]) -> None:
    off, static = (runs[policy].emulated for policy in POLICIES[:2])
    assert off["set_up"] == NAME and off["speed"] == SPEED
    assert off["work"]["draft"]["count"] == 0 < static["work"]["draft"]["count"]
    least = StepCost(SET_UP).verify_s(1, 0)
    for emulated in (off, static):
        target = emulated["work"]["target"]
        assert target["seconds"] >= target["count"] * least
        spent = sum(account["seconds"] for account in emulated["work"].values())
        assert emulated["now_s"] >= spent, "emulated time has at least what the device's work took"
    own = runs[f"static:{GAMMA}"].nightjar
    assert own is not None and own["draft_forwards"] == static["work"]["draft"]["count"]


def test_a_server_of_measured_steps(runs: dict[str, Run], tmp_path: Path) -> None:
    """Of another size, with other step times: the same contexts give the same tokens."""
    path = tmp_path / "box.json"
    path.write_text(json.dumps(MEASURED))
    words: list[Any] = ["--nightjar-emulate", path, "--nightjar-emulate-speed", SPEED, "--nightjar-policy", "static:2"]
    with serve(*words, "--nightjar-max-gamma", 2, "--nightjar-elastic", "on") as server:
        assert_same(run_all(server, requests()[:40], at_once=8), runs["off"].answers[:40])
        settle(server, "EVICTED")
        assert abs(memory(server)["slots"] - 12_000) < 100, "pages of memory hold some slots"
        state = server.get("/server_info")["internal_states"][0]
    assert state["emulated"]["set_up"] == "a-box"
    target, own = state["emulated"]["work"]["target"], state["nightjar"]
    steps = sum(own["steps_by_gamma"])
    assert own["steps_by_gamma"] == [0, 0, steps] and target["count"] > steps
    shortest, longest = MEASURED["seconds"][1]  # type: ignore[index]
    prompts = target["count"] - steps
    assert steps * shortest + prompts * 0.05 <= target["seconds"] <= steps * longest + prompts * 3.0
