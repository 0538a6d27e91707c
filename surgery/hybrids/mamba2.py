"""The hybrid of Mamba-2: some heads are attention.

Notation of arXiv 2405.21060. For each token t a layer projects its input to a gate z, a value x, a write vector B, a read
vector C and a time step dt > 0; x, B and C then pass a short convolution and SiLU. A head keeps a state S (head_dim x d_state),
which decays by exp(A dt_t), A < 0, is written at every token, and is read:

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t

With the recursion written out, and a_t = A dt_t, the state is a sum over all earlier tokens s, and so is the output:

    y_t = sum_{s<=t} exp(a_{s+1} + ... + a_t) (C_t . B_s) dt_s x_s + D x_t

This is linear attention: C is the query, B the key, x the value, C_t . B_s the score, exp(...) a decay with the distance, and
dt_s says how much token s writes. The *dual graft* of a head keeps x, D, gate, norm and out_proj, and replaces the sum alone:

    y_t = sigma sum_{s<=t} softmax_s(sigma tau C'_t . B'_s + log dt_s) x_s + D x_t

C' and B' come from the graft's own projections and convolution, which start as copies of the base's rows for C and B. The decay
is left out: softmax decides by the scores alone which tokens count, at any distance.

tau > 0, an inverse temperature, is learned; it starts at 1, or where the plan says. sigma is +1 or -1 and stays so: whatever
reads a head's output can turn its sign, so linear attention may have learned a match as its most *negative* score, which is as
good for it, and which softmax without sigma would never choose. log dt_s multiplies the weight of token s by dt_s, as in the
SSM: a token with a small time step draws little attention.

An entry of a hybrid configuration's `grafts` for head grafts, here and in all later mixers of this kind, is

{"kind": "head", "layer": int, "heads": [int, ...], "signs": [1 or -1, ...], "width": int, "shared": bool,
 "time_step": bool, "blend": float or None, "direct": False, "own_values": True or not there}

heads: sorted; signs: sigma of each; width: of queries and keys; shared: one query-key pair per B/C group instead of one per
head; time_step: whether log dt is added to the scores; blend: the initial value of a learned gate between the SSM output (0)
and attention (1), or None for attention alone; direct: false (up to 0.21 true of what started from a donor's heads);
own_values: the graft adds attention over values of its own, out of v_proj and into o_proj, to what
the mixer puts out, times `blend`. A layer graft's entry is layer_graft.layer_spec.
"""

from transformers import Mamba2Model
from transformers.models.mamba2.modeling_mamba2 import Mamba2Block, Mamba2RMSNorm

from surgery.hybrids.parts import RMSNorm
from surgery.hybrids.ssm_model import HybridBackbone, HybridBlock, HybridLanguageModel


class Mamba2Backbone(HybridBackbone, Mamba2Model):
    """What transformers' becomes."""


class Mamba2LanguageModel(HybridLanguageModel):
    exchanged = {Mamba2Model: Mamba2Backbone, Mamba2Block: HybridBlock, Mamba2RMSNorm: RMSNorm}
