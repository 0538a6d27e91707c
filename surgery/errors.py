"""The one exception that a user may cause."""


class UserError(Exception):
    """A wrong input. The command line prints its single line and exits with status 2."""
