"""`python -m expanse_controller`."""

from expanse_controller.cli import main

main()
