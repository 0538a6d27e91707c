"""`python -m surgery` (and `accelerate launch -m surgery`) is the command `surgery`."""

from surgery.cli.app import main

main()
