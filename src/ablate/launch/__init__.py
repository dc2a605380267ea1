"""Carrying out a plan: the sweeper that makes it, and the launchers that run it. Imports no torch."""
