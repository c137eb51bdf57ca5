import pytest

from firstlight.planning.work import state_work


def test_flop_of_a_kimi_k3_token_are_those_of_its_shapes(k3_work):
    # Routed 97.24, attention 72.36, shared 24.31, latent 9.45, head 2.35, dense 1.45, routers 1.18.
    assert k3_work.flops_per_token / 1e9 == pytest.approx(208.35, abs=0.01)


def test_flop_of_attention_and_recurrence_of_kimi_k3(k3, k3_work):
    costs = {k.state.kind: state_work(k.state, k3.facts, tp=1) for k in k3_work.kinds}
    assert 24 * costs["latent"].token_flops == pytest.approx(5.01e6, rel=0.001)
    assert 24 * costs["latent"].pair_flops == pytest.approx(1.475e6, rel=0.001)
    assert 69 * costs["recurrent"].step_flops == pytest.approx(0.76e9, rel=0.001)


def test_layers_that_compute_alike_are_grouped(k3_work):
    counts = [(len(kind.layers), kind.state.kind, len(kind.sums)) for kind in k3_work.kinds]
    assert counts == [(1, "recurrent", 2), (68, "recurrent", 3), (24, "latent", 3)]


def test_matrices_of_one_input_are_one_kernel(k3_work):
    moe = k3_work.kinds[1]
    experts = [m for m in moe.matmuls if m.is_expert]
    assert [len(m.classes) for m in experts] == [4, 2]  # codes and scales of w1 and w3, of w2
    assert sum(m.values for m in experts) == 33_030_144


def test_the_image_encoder_costs_what_its_shapes_say(k3_work):
    vision = k3_work.vision
    assert 2 * vision.patch_values / 1e9 == pytest.approx(0.79, abs=0.005)
    assert 2 * vision.feature_values / 1e9 == pytest.approx(0.09, abs=0.005)


def test_a_dense_model_has_no_experts_and_no_encoder(dense):
    from firstlight.planning.work import model_work

    work = model_work(dense, "float32")
    layer = 128 * 128 * 2 + 2 * 32 * 128 + 3 * 256 * 128
    assert work.flops_per_token == 2 * (5 * layer + 1000 * 128)
    assert work.chosen == 0 and work.vision is None
