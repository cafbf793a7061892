"""The one exception a person at the terminal is meant to read."""


class UserError(Exception):
    """A one-line message for the person at the terminal: what is wrong and what to do."""
