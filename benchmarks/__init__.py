"""Measurements: each module is a program that prints a table and writes its raw figures as JSON."""
