"""The `holdfast` command. `main` lists the commands and runs one; one module per noun; `output` and `say` print.

A command reads or changes one thing through `Client`, then shows it. Every decision of a command is open to a program
through the client as well.
"""
