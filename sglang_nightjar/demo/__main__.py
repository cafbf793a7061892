"""`python -m sglang_nightjar.demo`: prepare the demo model; its folder goes to standard output."""

import sys

from sglang_nightjar.demo.smollm2 import prepare_demo_model
from sglang_nightjar.errors import UserError


def main() -> int:
    """Prepare the model and print its folder; the exit status is 1, with one line, if that cannot be done."""
    try:
        print(prepare_demo_model())
    except UserError as error:
        print(f"[nightjar] error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
