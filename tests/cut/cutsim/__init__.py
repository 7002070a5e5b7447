"""Simulated jobs under the planner: programs, ranks that follow the rule, a network that delays."""
