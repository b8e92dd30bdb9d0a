"""Error that a user can fix. Importing this module loads nothing else."""


class UserError(Exception):
    """Problem that the user can fix; the message says what was expected, what was found, where, and what to do.

    Entry points print it as one line without a traceback.
    """
