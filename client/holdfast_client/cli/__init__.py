"""The `holdfast` command. `main` lists the commands and runs one; one module per noun; `output` is how anything
reaches the screen.

A command reads or changes one thing through `Client`, then shows it. No command decides anything that a program could
not ask of the client as well.
"""
