"""The one exception that means «the user can mend this»: printed as one line, exit code 2."""


class UserError(ValueError):
    """Bad input: what is wrong, where, and what to do, in one line and without a traceback."""


class ClientFailedError(RuntimeError):
    """A client did not deliver; the message names its domain and carries the client's own traceback."""


USER_ERROR = "user error: "  # prefix of an error reply that means «the user can mend this»
