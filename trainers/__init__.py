"""What is learnt from the rollouts: objective, log-probs, baselines, schedule."""
