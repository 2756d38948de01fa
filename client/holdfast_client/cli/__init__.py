"""The `holdfast` command. `commands` lists them, `main` runs one; one module per noun; `show` is how anything reaches
the screen.

A command reads or changes one thing through `Client`, then shows it. No command decides anything that a program could
not ask of the client as well.
"""
