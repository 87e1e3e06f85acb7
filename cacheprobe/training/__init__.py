"""Training: short, seeded loops on one processor core."""
