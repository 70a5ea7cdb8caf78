"""Arrays that remember what a model did with keys and values, so that attention is recognised.

latent_arrays        latent attention (MLA)
softcapped_arrays    attention with a softcap, which models write out themselves
"""
