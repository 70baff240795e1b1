"""Code shared by the families: Workload and Kind, metrics, evaluation and prediction, VAE training and latents on
disk."""
