"""Measuring: suites of prompts, methods in turn, tables of figures."""
