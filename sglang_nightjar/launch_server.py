"""`python -m sglang_nightjar.launch_server`: SGLang's server with Nightjar.

Takes every flag of `python -m sglang.launch_server`, plus `--nightjar-*`. Without
`--model-path` it serves the demo pair.
"""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_nightjar.config import NightjarConfig, add_arguments, load_config
from sglang_nightjar.errors import UserError
from sglang_nightjar.serving.startup import activate, guard_requests, server_options

_INTERRUPTED = 130  # what a shell reports of a process ended by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until stopped. Returns the exit status: 0, or 1 after one line about a user's mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        config, rest = load_config(words)
        ranks = _ranks(rest)
        activate(config, ranks=ranks)
        if "-h" in rest or "--help" in rest:
            _print_help()
            return 0
        server_args = _server_args(config, rest, ranks)
        _check_address(server_args.host, server_args.port)
        guard_requests(config)
        if config.resolved_platform() == "cpu":
            from sglang_nightjar.patches import process_start

            process_start.install()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return _serve(server_args)


def _ranks(words: Sequence[str]) -> int:
    """Tensor-parallel size, needed before SGLang may be imported (threads are set in the environment)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="ranks", default=None)
    parser.add_argument("--config", default=None)
    known = parser.parse_known_args(list(words))[0]
    value = known.ranks
    if value is None and known.config is not None:
        value = _ranks_in_file(Path(known.config))
    value = "1" if value is None else str(value)
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"--tp-size is {value}; give a whole number of ranks, 1 or more")
    return int(value)


def _ranks_in_file(path: Path) -> Any:
    """The same from SGLang's `--config` file, which names options like the command line does."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}; give a YAML file") from None
    options = {str(key).replace("-", "_"): value for key, value in content.items()} if isinstance(content, dict) else {}
    return next((options[name] for name in ("tp_size", "tensor_parallel_size", "tp") if name in options), None)


def _server_args(config: NightjarConfig, words: list[str], ranks: int) -> Any:
    from sglang.srt.server_args import prepare_server_args

    given = _given_options(words)
    if given.get("tp_size", 1) != ranks:
        raise UserError(f"the number of ranks is unclear: write --tp-size {given['tp_size']} in full")
    options = server_options(config, given)
    server_args = prepare_server_args(words + _as_words(options, given))
    try:
        server_args.resolve_once()
        server_args.check_server_args()  # upstream's launcher does this later, where a failure is a traceback
    except (ValueError, AssertionError, NotImplementedError, RuntimeError, OSError, ImportError) as error:
        raise UserError(f"SGLang refuses these options: {error}") from error
    return server_args


def _given_options(words: list[str]) -> dict[str, Any]:
    """The `ServerArgs` fields that `words` sets, SGLang's `--config` file included."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = _sglang_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
    if "--config" in words:
        try:
            words = ConfigArgumentMerger(parser).merge_config_with_args(words)
        except ValueError as error:
            raise UserError(f"--config: {error}") from None
    given = vars(parser.parse_args(words))
    if "config" in given:
        raise UserError("SGLang reads its configuration file only from --config FILE; write it as two words")
    return given


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


def _check_address(host: str, port: int) -> None:
    """Makes sure that the server will be able to listen: SGLang would find out after loading the models."""
    if not 1 <= port <= 65535:
        raise UserError(f"--port is {port}; choose a value from 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port or --host"
        ) from None


def _serve(server_args: Any) -> int:
    from sglang.launch_server import run_server
    from sglang.srt.utils.common import kill_process_tree

    try:
        run_server(server_args)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__mp_main__":
    # SGLang's processes import the main module first. Ctrl-C in a terminal reaches them all, and only
    # the first process is to answer it: it ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

if __name__ == "__main__":
    sys.exit(main())
