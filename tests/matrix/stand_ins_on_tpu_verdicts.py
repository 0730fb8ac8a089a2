"""Which operations a step on a TPU refuses and what the error has to say, and which are not asked."""

from __future__ import annotations

from collections.abc import Mapping

_BY_WORDS: Mapping[str, str] = {
    "needs a value that is not there": """
        torch.Tensor.__array__ torch.Tensor.__bool__ torch.Tensor.__float__ torch.Tensor.__format__
        torch.Tensor.__index__ torch.Tensor.__int__ torch.Tensor.__long__ torch.Tensor.__repr__
        torch.Tensor.allclose torch.Tensor.cpu torch.Tensor.equal torch.Tensor.item torch.Tensor.numpy
        torch.Tensor.tolist torch.allclose torch.equal of_another.numpy_array
    """,
    "depend": """
        torch.Tensor.is_nonzero torch.Tensor.masked_select torch.Tensor.nonzero torch.Tensor.unique
        torch.Tensor.unique_consecutive torch.is_nonzero torch.masked_select torch.nonzero torch.unique
        torch.unique_consecutive
    """,
    "the value of a tensor": """
        torch.Tensor.__contains__ torch._sym_sqrt torch.nn.functional._sym_int torch.scalar_tensor
        torch.sym_float torch.sym_int torch.sym_sqrt of_another.tensor_of_list
    """,
    "other numbers, or none": """
        torch.Tensor.geqrf torch.Tensor.logdet torch.Tensor.new_empty_strided torch.Tensor.ormqr
        torch.Tensor.pinverse torch.Tensor.polygamma_ torch.Tensor.slogdet torch.Tensor.stft torch.Tensor.svd
        torch.geqrf torch.linalg.cond torch.linalg.eig torch.linalg.eigvals torch.linalg.inv_ex
        torch.linalg.lstsq torch.linalg.matrix_rank torch.linalg.pinv torch.linalg.slogdet torch.linalg.svd
        torch.linalg.svdvals torch.logdet torch.lu_unpack torch.nuclear_norm torch.ormqr torch.pinverse
        torch.slogdet torch.stft torch.svd
    """,
    "complex numbers": """
        torch.Tensor.istft torch.istft torch.view_as_real_copy
    """,
    "memory": """
        torch.Tensor.as_strided_ torch.Tensor.as_strided_scatter torch.Tensor.resize_ torch.Tensor.resize_as_
        torch.as_strided_scatter
    """,
    "sparse tensor": """
        torch.Tensor.to_sparse torch.Tensor.to_sparse_coo torch.sparse_coo_tensor
        of_another.sparse_values_without_sizes
    """,
    "write what differs between replicas": """
        of_another.set_
    """,
    "for all replicas at once": """
        torch.Tensor.align_to torch.Tensor.chalf torch.Tensor.is_distributed torch.Tensor.refine_names
        torch.Tensor.rename torch.Tensor.rename_ torch.Tensor.resize_as torch.Tensor.slice_inverse
        torch.Tensor.sparse_dim torch.Tensor.to_sparse_bsc torch.Tensor.to_sparse_bsr torch.Tensor.to_sparse_csc
        torch.Tensor.to_sparse_csr torch.Tensor.untyped_storage torch._foreach_abs torch._foreach_acos
        torch._foreach_add torch._foreach_addcdiv torch._foreach_addcmul torch._foreach_asin torch._foreach_atan
        torch._foreach_ceil torch._foreach_clamp_max torch._foreach_clamp_min torch._foreach_cos
        torch._foreach_cosh torch._foreach_div torch._foreach_erf torch._foreach_erfc torch._foreach_exp
        torch._foreach_expm1 torch._foreach_floor torch._foreach_frac torch._foreach_lerp torch._foreach_lgamma
        torch._foreach_log torch._foreach_log10 torch._foreach_log1p torch._foreach_log2 torch._foreach_max
        torch._foreach_maximum torch._foreach_minimum torch._foreach_mul torch._foreach_neg torch._foreach_norm
        torch._foreach_pow torch._foreach_reciprocal torch._foreach_round torch._foreach_rsqrt
        torch._foreach_sigmoid torch._foreach_sign torch._foreach_sin torch._foreach_sinh torch._foreach_sqrt
        torch._foreach_sub torch._foreach_tan torch._foreach_tanh torch._foreach_trunc torch.chain_matmul
        torch.column_stack torch.histogramdd torch.nn.init.eye_ torch.slice_inverse torch.split_copy
        torch.unbind_copy
    """,
}
"""What the error says → the operations that raise it."""

_IN_OTHER_WORDS = """
    torch.is_distributed torch.Tensor.dense_dim torch.tensor torch.native_batch_norm torch.native_layer_norm
    torch.lobpcg torch.Tensor.__rrshift__ torch.from_dlpack of_another.new_tensor
"""

REFUSED: Mapping[str, str] = {
    **{key: words for words, keys in _BY_WORDS.items() for key in keys.split()},
    **dict.fromkeys(_IN_OTHER_WORDS.split(), "in a step|at once"),
}

_NONE = """
    torch.Tensor.__array_wrap__ torch.Tensor.__complex__ torch.Tensor.__delitem__ torch.Tensor.__ifloordiv__
    torch.Tensor.__nonzero__ torch.Tensor._autocast_to_full_precision
    torch.Tensor._autocast_to_reduced_precision torch.Tensor._coalesced_ torch.Tensor._dimI torch.Tensor._dimV
    torch.Tensor._indices torch.Tensor._nested_tensor_size torch.Tensor._nested_tensor_storage_offsets
    torch.Tensor._nested_tensor_strides torch.Tensor._nnz torch.Tensor._sparse_mask_projection
    torch.Tensor._to_dense torch.Tensor._update_names torch.Tensor._values torch.Tensor.add_
    torch.Tensor.align_as torch.Tensor.as_subclass torch.Tensor.backward torch.Tensor.ccol_indices
    torch.Tensor.coalesce torch.Tensor.col_indices torch.Tensor.crow_indices torch.Tensor.cuda torch.Tensor.eig
    torch.Tensor.eq_ torch.Tensor.indices torch.Tensor.int_repr torch.Tensor.ipu torch.Tensor.is_coalesced
    torch.Tensor.logical_and_ torch.Tensor.logical_or_ torch.Tensor.lstsq torch.Tensor.mtia torch.Tensor.ne_
    torch.Tensor.q_per_channel_axis torch.Tensor.q_per_channel_scales torch.Tensor.q_per_channel_zero_points
    torch.Tensor.q_scale torch.Tensor.q_zero_point torch.Tensor.qscheme torch.Tensor.record_stream
    torch.Tensor.reinforce torch.Tensor.resize torch.Tensor.resize_as_sparse_ torch.Tensor.row_indices
    torch.Tensor.smm torch.Tensor.solve torch.Tensor.sparse_mask torch.Tensor.sparse_resize_
    torch.Tensor.sparse_resize_and_clear_ torch.Tensor.sspaddmm torch.Tensor.symeig torch.Tensor.to_mkldnn
    torch.Tensor.to_padded_tensor torch.Tensor.unsafe_split_with_sizes torch.Tensor.values torch.Tensor.xpu
    torch.adaptive_max_pool1d torch.affine_grid_generator torch.alpha_dropout torch.autocast torch.batch_norm
    torch.batch_norm_backward_elemt torch.batch_norm_backward_reduce torch.batch_norm_elemt
    torch.batch_norm_gather_stats torch.batch_norm_gather_stats_with_counts torch.batch_norm_stats
    torch.batch_norm_update_stats torch.ccol_indices_copy torch.choose_qparams_optimized torch.col_indices_copy
    torch.conv_tbc torch.convolution torch.cosine_embedding_loss torch.crow_indices_copy torch.ctc_loss
    torch.dropout torch.einsum torch.embedding_bag torch.fake_quantize_per_channel_affine
    torch.fake_quantize_per_tensor_affine torch.fbgemm_linear_fp16_weight
    torch.fbgemm_linear_fp16_weight_fp32_activation torch.fbgemm_linear_int8_weight
    torch.fbgemm_linear_int8_weight_fp32_activation torch.fbgemm_linear_quantize_weight
    torch.fbgemm_pack_gemm_matrix_fp16 torch.fbgemm_pack_quantized_matrix torch.feature_alpha_dropout
    torch.feature_dropout torch.fused_moving_avg_obs_fake_quant torch.grid_sampler torch.gru torch.gru_cell
    torch.hinge_embedding_loss torch.hsmm torch.hspmm torch.indices_copy torch.instance_norm torch.int_repr
    torch.kl_div torch.lstm torch.lstm_cell torch.margin_ranking_loss torch.max_pool1d torch.max_pool2d
    torch.max_pool3d torch.miopen_batch_norm torch.miopen_convolution torch.miopen_convolution_add_relu
    torch.miopen_convolution_relu torch.miopen_convolution_transpose torch.miopen_depthwise_convolution
    torch.miopen_rnn torch.native_dropout torch.native_norm torch.nn.functional.affine_grid
    torch.nn.functional.conv_tbc torch.nn.functional.embedding torch.nn.functional.fold
    torch.nn.functional.fractional_max_pool2d_with_indices
    torch.nn.functional.fractional_max_pool3d_with_indices torch.nn.functional.lp_pool3d
    torch.nn.functional.max_pool3d_with_indices torch.nn.init.dirac_ torch.pca_lowrank torch.poisson_nll_loss
    torch.polygamma torch.q_per_channel_axis torch.q_per_channel_scales torch.q_per_channel_zero_points
    torch.q_scale torch.q_zero_point torch.quantize_per_channel torch.quantize_per_tensor
    torch.quantize_per_tensor_dynamic torch.quantized_batch_norm torch.quantized_gru_cell
    torch.quantized_lstm_cell torch.quantized_max_pool1d torch.quantized_max_pool2d torch.quantized_max_pool3d
    torch.quantized_rnn_relu_cell torch.quantized_rnn_tanh_cell torch.rnn_relu torch.rnn_relu_cell
    torch.rnn_tanh torch.rnn_tanh_cell torch.row_indices_copy torch.saddmm torch.smm torch.sparse_csr_tensor
    torch.special.polygamma torch.sspaddmm torch.svd_lowrank torch.sym_ite torch.sym_max torch.sym_min
    torch.unsafe_split_with_sizes torch.values_copy torch.view_as_complex_copy torch.where
    of_another.tensor_of_rows
"""
NO_ARGUMENTS = frozenset(_NONE.split())
"""Plain PyTorch accepts none of the calls that are known; with a tensor of a step there is nothing to compare."""

_ONE_PLACE = "right but for kernels and images of one place, for which the compiler refuses the whole step"
_SOME = "right or refused, as the arguments are"
RIGHT_ELSEWHERE: Mapping[str, str] = {
    "torch.Tensor.to": _SOME,
    "torch.sym_not": _SOME,
    "of_another.sparse_values": _SOME,
    "torch.DoubleTensor": "PyTorch's own error about the device",
    "torch.nn.init.normal_": _SOME,
    "torch.linalg.matrix_norm": _SOME,
    "torch.Tensor.set_": "PyTorch shows it to no mode; what is made of its result is refused when the step is run",
    "torch.conv3d": _ONE_PLACE,
    "torch.nn.functional.conv3d": _ONE_PLACE,
    "torch.conv_transpose3d": _ONE_PLACE,
    "torch.nn.functional.conv_transpose3d": _ONE_PLACE,
}
"""Operations that are left out, and why: a step that the compiler refuses would take the next ones with it."""
