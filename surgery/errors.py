"""The one exception that users cause."""


class UserError(Exception):
    """Input that cannot be used. Its text is one line that names the input and says what to do; commands exit with 2."""
