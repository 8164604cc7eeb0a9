"""`python -m specgraft`, as torchrun starts it."""

from specgraft.cli import main

main()
