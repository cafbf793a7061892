"""The ledger against plain sums, and what a person reads when the budget is too small."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_nightjar.errors import UserError
from sglang_nightjar.memory.ledger import Account, Ledger, OverBudget

CAPACITY = 1000
CHANGES = st.dictionaries(st.sampled_from(Account), st.integers(-600, 600))


@given(steps=st.lists(CHANGES, max_size=20))
def test_transfers_happen_whole_or_not_at_all(steps: list[dict[Account, int]]) -> None:
    ledger, model = Ledger(CAPACITY), dict.fromkeys(Account, 0)
    for changes in steps:
        after = {account: held + changes.get(account, 0) for account, held in model.items()}
        if min(after.values()) < 0:
            with pytest.raises(AssertionError, match="which holds"):
                ledger.transfer(changes)
        elif sum(after.values()) > CAPACITY:
            with pytest.raises(OverBudget):
                ledger.transfer(changes)
        else:
            ledger.transfer(changes)
            model = after
        assert {account: ledger.held(account) for account in Account} == model
        assert ledger.free == CAPACITY - sum(model.values())


def test_a_full_device_can_pass_memory_from_one_account_to_another() -> None:
    ledger = Ledger(CAPACITY)
    ledger.charge(Account.TARGET_KV, 700)
    ledger.charge(Account.DRAFT_WEIGHTS, 300)
    ledger.transfer({Account.TARGET_KV: 300, Account.DRAFT_WEIGHTS: -300})
    assert (ledger.held(Account.TARGET_KV), ledger.held(Account.DRAFT_WEIGHTS), ledger.free) == (1000, 0, 0)


def test_over_budget_says_what_to_change() -> None:
    ledger = Ledger(CAPACITY)
    ledger.charge(Account.TARGET_WEIGHTS, 600)
    with pytest.raises(OverBudget) as caught:
        ledger.charge(Account.DRAFT_KV, 500)
    message = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert message.startswith("draft_kv: 500 more bytes") and "400 of 1000 are free" in message
    assert "set --nightjar-device-memory to at least 1100 bytes" in message
    assert ledger.report() == {
        "capacity": 1000,
        "free": 400,
        "target_weights": 600,
        "target_kv": 0,
        "draft_weights": 0,
        "draft_kv": 0,
        "workspace": 0,
    }
    Ledger(1100).transfer({Account.TARGET_WEIGHTS: 600, Account.DRAFT_KV: 500})  # what it says is enough


def test_charges_and_releases_are_not_negative() -> None:
    ledger = Ledger(CAPACITY)
    ledger.charge(Account.WORKSPACE, 10)
    with pytest.raises(AssertionError, match="-1 bytes"):
        ledger.charge(Account.WORKSPACE, -1)
    with pytest.raises(AssertionError, match="-1 bytes"):
        ledger.release(Account.WORKSPACE, -1)
    with pytest.raises(AssertionError, match="11 bytes released from workspace, which holds 10"):
        ledger.release(Account.WORKSPACE, 11)
    ledger.release(Account.WORKSPACE, 10)
    assert ledger.free == CAPACITY
