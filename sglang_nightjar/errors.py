"""The one exception a person at the terminal is meant to read."""


class UserError(Exception):
    """A one-line message for the person at the terminal: what is wrong and what to do.

    Line breaks, such as those of a library's own message quoted in it, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
