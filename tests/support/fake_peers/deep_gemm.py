"""DeepGEMM as `launch.research.peers` calls it, in torch. FAKE_DEEP_GEMM has it be wrong, raise, hang or die."""

import os
import time

import torch

__version__ = "2.6.1"
BLOCK = 128


def get_mk_alignment_for_contiguous_layout():
    return 128


def get_mn_major_tma_aligned_tensor(scales):
    return scales


def _rows(pair):
    quants, scales = pair
    return quants.float() * scales.repeat_interleave(BLOCK, dim=-1)[..., : quants.shape[-1]]


def _weights(pair):
    quants, scales = pair
    return quants.float() * scales.repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)


def _behave(out):
    mode = os.environ.get("FAKE_DEEP_GEMM", "")
    if mode == "raises":
        raise RuntimeError("no kernel\nfor this shape")
    if mode == "hangs":
        time.sleep(3600)
    if mode == "dies" and os.environ.get("RANK") == "1":
        os._exit(7)
    return 1.5 if mode == "wrong" else 1.0


def m_grouped_fp8_gemm_nt_masked(a, w, out, masked_m, expected_m):
    factor, rows, weights = _behave(out), _rows(a), _weights(w)
    assert out.dtype == torch.bfloat16 and masked_m.dtype == torch.int32 and expected_m >= 1
    for expert, size in enumerate(masked_m.tolist()):
        out[expert, :size] = factor * rows[expert, :size] @ weights[expert].T


def m_grouped_fp8_gemm_nt_contiguous(a, w, out, m_indices):
    factor, rows, weights = _behave(out), _rows(a), _weights(w)
    assert out.shape[0] == m_indices.shape[0] == rows.shape[0] and m_indices.shape[0] % 128 == 0
    for expert in m_indices.unique().tolist():
        if expert >= 0:
            here = m_indices == expert
            out[here] = (factor * rows[here] @ weights[expert].T).bfloat16()
