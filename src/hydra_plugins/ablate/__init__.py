"""Hydra instantiates launchers and sweepers only from modules named hydra_plugins.*; the classes live in ablate.launch.

Every Hydra application of the environment imports this package, so it stays light.
"""
