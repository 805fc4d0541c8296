"""`python -m jaxmf` is `jaxmf`."""

from .cli import main

main()
