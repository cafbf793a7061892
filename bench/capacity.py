"""KV slots of the published set-ups, by arithmetic: with the draft, without its weights alone, without weights and KV.

    scripts/python bench/capacity.py

The first and the last are `SetUp.slots`, and what elastic memory here moves between. The paper gives back the weights
alone: the draft's KV stays, and of the room that its weights leave, one slot takes the target's KV only.
"""

from sglang_nightjar.simulate.roofline import SetUp
from sglang_nightjar.simulate.setups import SET_UPS


def weights_only(set_up: SetUp) -> int:
    """KV slots once the draft's weights, but not its KV, have left the device."""
    return set_up.slots(True) + int(set_up.draft.weight_bytes / set_up.target.kv_bytes)


def main() -> None:
    print("| set-up | draft loaded | weights away | | weights and KV away | |")
    print("| :-- | ---: | ---: | ---: | ---: | ---: |")
    for set_up in SET_UPS.values():
        loaded, weights, both = set_up.slots(True), weights_only(set_up), set_up.slots(False)
        gains = [f"+{slots / loaded - 1.0:.1%}" for slots in (weights, both)]
        print(f"| {set_up.name} | {loaded} | {weights} | {gains[0]} | {both} | {gains[1]} |")


if __name__ == "__main__":
    main()
