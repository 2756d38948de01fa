"""When a step is saved: the policies that a script names, the best so far, and the decision after each step."""
