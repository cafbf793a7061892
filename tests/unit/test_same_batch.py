"""A batch is known by its list of requests."""

from types import SimpleNamespace

from sglang_nightjar.speculation.same_batch import SameBatch


def test_the_same_list_of_the_same_length() -> None:
    same, batch = SameBatch(), SimpleNamespace(reqs=[1, 2])
    assert [same(batch), same(batch)] == [False, True]
    batch.reqs.append(3)
    assert [same(batch), same(batch)] == [False, True]
    batch.reqs = batch.reqs[:]  # as when requests join or leave
    assert [same(batch), same(SimpleNamespace(reqs=batch.reqs))] == [False, True]
    same.forget()
    assert [same(batch), same(batch)] == [False, True]
