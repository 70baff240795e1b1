"""RadioDiff's autoencoder."""

from __future__ import annotations

import torch

from golden import assert_golden, assert_golden_gradients, golden, group
from halfstep_train.models.posterior import draw_latent, kl_divergence
from halfstep_train.workloads.radio.names import rename_vae_weight
from halfstep_train.workloads.radio.vae import RadioVAE

VAE_TOLERANCE = 5e-5
"""The original's own drift with other kernels reaches 1e-5 here."""


def test_golden_moments_reconstruction_and_gradients() -> None:
    tensors, facts = golden("radiodiff_vae_tiny")
    sizes = facts["config"]["ddconfig"]
    vae = RadioVAE(width=sizes["ch"], multipliers=sizes["ch_mult"], num_blocks=sizes["num_res_blocks"])
    vae.load_state_dict({rename_vae_weight(name): value for name, value in group(tensors, "state/").items()})
    image, expected = tensors["in/image"], group(tensors, "out/")

    mean, log_variance = vae.encode(image)
    latents, kl = draw_latent(mean, log_variance, tensors["noise/posterior"]), kl_divergence(mean, log_variance)
    reconstruction = vae.decode(latents)
    found = {
        "moments": vae.quant_conv(vae.encoder(image)),
        "mean": mean,
        "logvar": log_variance,
        "z": latents,
        "recon": reconstruction,
        "recon_mode": vae.decode(mean),
        "kl": kl,
    }
    assert set(found) == set(expected)
    for name, value in found.items():
        assert_golden(value, expected[name], within=VAE_TOLERANCE, name=name)

    error = image - reconstruction
    nll = (error.abs() + error.square()).sum() / len(image)
    loss = nll + 1e-6 * kl.sum() / len(image)
    assert abs(loss.item() / facts["scalars"]["loss"] - 1) < VAE_TOLERANCE
    loss.backward()
    assert_golden_gradients(
        vae, tensors, facts, rename=rename_vae_weight, within=VAE_TOLERANCE, within_group=VAE_TOLERANCE
    )
    parameters = dict(vae.named_parameters())
    for name, norms in facts["gradients_not_stored"].items():
        grad = parameters[name].grad
        assert grad is not None
        assert abs(float(grad.norm()) / norms["l2_norm"] - 1) < VAE_TOLERANCE


def test_a_latent_is_a_quarter_of_the_map_and_odd_widths_have_their_groups() -> None:
    vae = RadioVAE(width=12, multipliers=(1, 2, 4), num_blocks=1)
    maps = torch.randn(2, 1, 24, 16)
    found = vae(maps, torch.zeros(2, 3, 6, 4))
    assert found["image"].shape == maps.shape
    assert found["latent"].shape == (2, 3, 6, 4)
    assert vae.reduction == 4
