"""Whether the installed SGLang is the one the contract was written for, asked before anything is installed."""

import importlib.metadata

from sglang_nightjar.errors import UserError
from sglang_nightjar.patches.contract import CONTRACT, SGLANG_VERSION
from sglang_nightjar.patches.contract_lines import Entry, parse
from sglang_nightjar.patches.source_scan import module_definitions, package_root


class ContractError(UserError):
    """SGLang is not the one this code was written for; the message names every difference."""


def entries(text: str = CONTRACT) -> list[Entry]:
    """The contract, parsed."""
    return parse(text)


def check_contract() -> int:
    """Compares the installed SGLang with the contract. Takes about a second; imports nothing of SGLang.

    Returns:
        The number of entries checked.
    Raises:
        ContractError: another version, or names that differ; every difference is in the message.
    """
    try:
        version = importlib.metadata.version("sglang")
        root = package_root("sglang")
    except ModuleNotFoundError:
        raise ContractError(f"sglang is not installed; run: pip install sglang=={SGLANG_VERSION}") from None
    contract = entries()
    problems = []
    for entry in contract:
        try:
            definitions = module_definitions(root, entry.module)
        except FileNotFoundError:
            problems.append(f"sglang.{entry.module} is gone")
            continue
        problem = entry.drift(definitions)
        if problem:
            problems.append(problem)
    if version != SGLANG_VERSION:
        problems.insert(0, f"this is sglang {version}, and Nightjar is written for {SGLANG_VERSION}")
    if problems:
        raise ContractError(
            f"{'; '.join(dict.fromkeys(problems))}. Install the pinned version: pip install sglang=={SGLANG_VERSION}"
        )
    return len(contract)
