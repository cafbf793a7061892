"""(placeholder, filled below)"""


def check_contract() -> None: ...
