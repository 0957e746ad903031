"""Process-wide settings of training."""

import torch

from carmil.training.process_settings import configure_process


def test_cudnn_attention_is_disabled():
    torch.backends.cuda.enable_cudnn_sdp(True)
    configure_process()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
