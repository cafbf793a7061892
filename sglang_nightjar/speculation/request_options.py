"""What a request may ask of Nightjar, through SGLang's `custom_params`.

    {"sampling_params": {"custom_params": {"nightjar": {"speculate": false}}}}

keeps that request off speculation; its neighbours in the batch are not affected.
"""

from typing import Any


def check_options(custom_params: Any) -> None:
    """Raises `ValueError`, which the server answers with HTTP 400, where the `nightjar` entry is malformed."""
    if not isinstance(custom_params, dict) or "nightjar" not in custom_params:
        return
    options = custom_params["nightjar"]
    if not isinstance(options, dict):
        raise ValueError(f"custom_params.nightjar must be an object, not {type(options).__name__}.")
    for name, value in options.items():
        if name != "speculate":
            raise ValueError(f"custom_params.nightjar.{name} is unknown; known: speculate.")
        if not isinstance(value, bool):
            raise ValueError(f"custom_params.nightjar.speculate must be true or false, not {value!r}.")


def speculates(req: Any) -> bool:
    """Whether a request (SGLang's `Req`) allows drafts."""
    params = req.sampling_params.custom_params
    if not isinstance(params, dict):
        return True
    options = params.get("nightjar")
    return not isinstance(options, dict) or options.get("speculate", True) is not False
