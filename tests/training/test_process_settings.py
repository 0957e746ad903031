"""What training sets for the whole process."""

import torch

from carmil.training.process_settings import configure_process


def test_attention_does_not_plan_for_every_size_of_bag():
    torch.backends.cuda.enable_cudnn_sdp(True)
    configure_process()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
