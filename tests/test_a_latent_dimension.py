"""The chapter on the latent dimension: each of its checks refuses a planted fault."""

from functools import partial

from torch import nn

from ditbook.transformer import ScoreNetwork, Transformer

CHAPTER = "a-latent-dimension"


class TestPlantedFaults:
    """Each wrong variant is refused by the chapter's own check."""

    def test_sigma_as_a_standard_deviation_in_the_orthogonal_part(self, rejects):
        def wrong(law, x, t):
            _, across, sigma = law._split(x, t)
            return -across / sigma.sqrt()[..., None]

        rejects(CHAPTER, "appendix-A", {"ditbook.subspace.SubspaceLaw.orthogonal_score": wrong})

    def test_an_on_support_part_without_its_basis(self, rejects):
        def wrong(law, x, t):
            return x @ law.basis @ law.basis.mT

        rejects(CHAPTER, "appendix-A", {"ditbook.subspace.SubspaceLaw.on_support_score": wrong})

    def test_a_skip_connection_without_sigma(self, rejects):
        def wrong(x, decoded, sigma):
            return decoded / sigma - x

        rejects(CHAPTER, "appendix-A", {"ditbook.transformer.assemble": wrong})

    def test_a_third_head_that_nobody_counted(self, rejects):
        rejects(CHAPTER, "appendix-A", {"ditbook.transformer.Transformer": partial(Transformer, heads=3)})

    def test_a_transformer_that_grows_with_the_ambient_dimension(self, rejects):
        def wrong(W_B, f, *times, **options):
            f.extra = nn.Linear(len(W_B), 1)
            return ScoreNetwork(W_B, f, *times, **options)

        rejects(CHAPTER, "erratum-30", {"ditbook.transformer.ScoreNetwork": wrong})

    def test_an_encoder_whose_parameters_are_not_counted(self, rejects):
        def wrong(W_B, f, *times, train_basis):
            return ScoreNetwork(W_B, f, *times)

        rejects(CHAPTER, "erratum-33", {"ditbook.transformer.ScoreNetwork": wrong})

    def test_a_shift_of_the_queries_without_its_weights_on_the_keys(self, rejects):
        def unweighted(keys, shift):
            return keys.new_ones(len(keys))

        rejects(CHAPTER, "erratum-33", {"ditbook.attention.query_shift_weights": unweighted})
