"""Error that a user can mend. Light: raising it loads nothing."""


class UserError(Exception):
    """Problem the user can mend; its text says what was expected, what came, where, and what to do.

    Entry points print it as one line without a traceback.
    """
