"""The trained policy: its forward pass (`model`) and its sharding, optimizer and checkpoints (`deepspeed`)."""
