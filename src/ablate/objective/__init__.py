"""The objective as pure maths: tensors in, tensors out. No config object, no collective, no I/O.

One file per factor (`surrogate`, `reduction`, `tis`, `advantage`, `kl`); their public functions are the
mechanisms that a level file names. `loss` composes them in one fixed order, `metrics` turns their tensors
into numbers. Importing this package imports no torch, so a planner can read `bounds` cheaply.
"""
