"""Whether SGLang really applied a hook: it logs and swallows what fails while it does."""

import pkgutil


def require_applied(*targets: str) -> None:
    """Raises `RuntimeError` on the first of `targets` (dotted names of functions) that no hook wraps."""
    for target in targets:
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise RuntimeError(f"SGLang did not apply the hook on {target}; its log says why")
