"""Gamma changes while requests run: no draft forward while it is 0, all ranks agree, requests may opt out."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import Server, serve_all
from workload import Request, assert_same, nightjar, random_tokens, run_all

from sglang_nightjar.observe.journal import read_journal

GAMMA = 3
SWITCHES = 1000


class Servers(NamedTuple):
    static: Server
    switching: Server
    journal: Path


@pytest.fixture(scope="module")
def servers(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    journal = tmp_path_factory.mktemp("journal") / "journal"
    common: list[Any] = ["--model-path", tiny_target, "--speculative-draft-model-path", tiny_draft, "--nightjar-policy"]
    switching = [*common, "random:1", "--nightjar-journal", journal, "--tp", 2]
    with serve_all([[*common, f"static:{GAMMA}"], switching]) as (static, other):
        yield Servers(static, other, journal)


@pytest.fixture(scope="module")
def switched(servers: Servers) -> list[dict[str, Any]]:
    """The journal of rank 0 after more than `SWITCHES` changes of gamma; the answers stay the same."""
    rng = random.Random(5)
    requests = [Request(random_tokens(rng, rng.randrange(1, 120)), 200) for _ in range(24)]
    expected = run_all(servers.switching, requests, at_once=2)
    for _ in range(20):
        records = read_journal(servers.journal)
        gammas = [record["gamma"] for record in records if record["record"] == "directive"]
        if sum(a != b for a, b in pairwise(gammas)) > SWITCHES:
            return records
        assert_same(run_all(servers.switching, requests, at_once=2), expected)
    raise AssertionError(f"too few switches: {nightjar(servers.switching)}")


@pytest.mark.usefixtures("switched")
def test_all_ranks_carry_out_the_same_directives(servers: Servers) -> None:
    # Read now, when both are idle: an answer may reach its client before the step's last record its file.
    first = [record for record in read_journal(servers.journal) if record["record"] == "directive"]
    second = read_journal(servers.journal.with_name("journal.rank1"))
    assert len(first) > SWITCHES and first == second
    assert {record["gamma"] for record in first} == set(range(6))
    channel = nightjar(servers.switching)["channel"]
    assert channel["received"] >= len(first) // 64 - 1 and channel["disagreements"] == 0, channel


def test_no_draft_forward_while_gamma_is_0(switched: list[dict[str, Any]]) -> None:
    """Neither a decode step nor a prefill that runs under a directive of gamma 0 runs the draft."""
    gamma, forwards, off_steps, on_forwards = None, 0, 0, 0
    for record in switched:
        if record["record"] == "directive":
            gamma = record["gamma"]
        elif record["record"] == "step" and gamma is not None:
            ran = record["draft_forwards"] - forwards
            if gamma == 0:
                assert ran == 0, record
                off_steps += 1
            elif record["batch_size"]:
                assert ran >= gamma or record["drafted"] == 0, record
                on_forwards += ran
        forwards = record.get("draft_forwards", forwards)
    assert off_steps > 100 and on_forwards > 1000


def test_a_request_keeps_itself_off_speculation(servers: Servers) -> None:
    """Its neighbours in the batch go on drafting, and nobody's output changes."""
    rng = random.Random(6)
    prompts = [random_tokens(rng, rng.randrange(5, 60)) for _ in range(12)]

    def answer(index: int, speculate: bool) -> Any:
        custom = {"nightjar": {"speculate": speculate}}
        return servers.static.generate(prompts[index], max_new_tokens=40, ignore_eos=True, custom_params=custom)

    with ThreadPoolExecutor(12) as pool:
        expected = list(pool.map(lambda index: answer(index, False), range(12)))
        answers = list(pool.map(lambda index: answer(index, index % 2 == 0), range(12)))
    assert not any(each["meta_info"]["spec_num_correct_drafts"] for each in expected)
    assert_same(answers, expected)
    accepted = [each["meta_info"]["spec_num_correct_drafts"] for each in answers]
    assert not any(accepted[1::2]) and all(accepted[::2]), accepted
    for index, each in enumerate(answers):
        [story] = each["meta_info"]["nightjar"]
        assert story["gamma"] == GAMMA and (story["draft_forwards"] > GAMMA or index % 2), story
        # Of 40 tokens the prefill gives the first; a step that drafts gives 1 to GAMMA + 1 of the others.
        assert (story["speculative_steps"] == 0) == (index % 2 == 1), story
        assert story["accept_length"] is None or 1.0 < story["accept_length"] <= GAMMA + 1, story


def test_when_all_opt_out_no_step_drafts(servers: Servers) -> None:
    before = nightjar(servers.static)
    servers.static.generate(
        [7, 8, 9], max_new_tokens=30, ignore_eos=True, custom_params={"nightjar": {"speculate": False}}
    )
    after = nightjar(servers.static)
    assert after["steps_by_gamma"][0] - before["steps_by_gamma"][0] == 29
    assert after["steps_by_gamma"][GAMMA] == before["steps_by_gamma"][GAMMA]
    assert after["draft_forwards"] - before["draft_forwards"] == 1, "its prompt, which the draft reads for the cache"


def test_a_malformed_option_is_refused(servers: Servers) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"custom_params": {"nightjar": {"speculate": "no"}}}}
    assert servers.static.status_of("/generate", body) == 400
