"""`python -m sglang_nightjar.launch_server`: SGLang's server with Nightjar.

Takes every flag of `python -m sglang.launch_server`, plus `--nightjar-*`. Without
`--model-path` it serves the demo pair.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from sglang_nightjar.config import NightjarConfig, add_arguments, load_config
from sglang_nightjar.errors import UserError
from sglang_nightjar.serving.startup import activate, server_options


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until stopped. Returns the exit status: 0, or 1 after one line about a user's mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        config, rest = load_config(words)
        activate(config, ranks=_ranks(rest))
        if "-h" in rest or "--help" in rest:
            _print_help()
            return 0
        server_args = _server_args(config, rest)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _serve(server_args)
    return 0


def _ranks(words: Sequence[str]) -> int:
    """Tensor-parallel size, needed before SGLang may be imported (threads are set in the environment)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="ranks", default="1")
    value = parser.parse_known_args(list(words))[0].ranks
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"--tp-size is {value!r}; give a whole number of ranks, 1 or more")
    return int(value)


def _server_args(config: NightjarConfig, words: list[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    given = _given_options(words)
    options = server_options(config, given)
    server_args = prepare_server_args(words + _as_words(options, given))
    try:
        server_args.resolve_once()
    except (ValueError, AssertionError) as error:
        raise UserError(f"SGLang refuses these options: {' '.join(str(error).split())}") from error
    return server_args


def _given_options(words: list[str]) -> dict[str, Any]:
    """The `ServerArgs` fields that `words` sets, SGLang's `--config` file included."""
    parser = _sglang_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
    if "--config" in words:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        words = ConfigArgumentMerger(parser).merge_config_with_args(words)
    return vars(parser.parse_args(words))


def _as_words(options: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Command-line words for the options that are not among `given`."""
    words: list[str] = []
    for name, value in options.items():
        if name in given and given[name] == value:
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words


def _sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="python -m sglang_nightjar.launch_server")
    ServerArgs.add_cli_args(parser)
    return parser


def _print_help() -> None:
    parser = _sglang_parser()
    add_arguments(parser)
    parser.print_help()


def _serve(server_args: Any) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.utils.common import kill_process_tree

    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    sys.exit(main())
