"""What a person got wrong, said in one sentence; and what a run ran into."""


class InputError(ValueError):
    """Bad input: the message says what is wrong, where, and what would be right.

    The command line prints it and exits with status 2.
    """


class NonFiniteError(ArithmeticError):
    """A run whose tokens stopped being finite: the message says at which time and β."""
