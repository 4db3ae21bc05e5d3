"""The one exception type for what a user can cause."""


class UserError(ValueError):
    """A request that cannot be met: says what was required, what was given, and what to do.

    The command line prints it in one line, without a traceback; every other exception is a
    defect of ours and keeps its traceback.
    """
