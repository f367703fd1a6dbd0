// Every instruction that tests/emulator/machine knows, as LLVM's assembler spells it: what clang makes of our kernels,
// and their siblings. tests/kernels/test_hip_machine.py assembles them and has them decoded.

.text
ds_bpermute_b32 v22, v17, v16
ds_read2_b32 v[26:27], v53 offset1:8
ds_read2_b64 v[4:7], v2 offset0:18 offset1:34
ds_read2st64_b32 v[22:23], v60 offset0:29 offset1:38
ds_read2st64_b64 v[0:3], v9 offset0:1 offset1:2
ds_read_b128 v[28:31], v46 offset:5136
ds_read_b32 v27, v22
ds_read_b64 v[4:5], v3 offset:12424
ds_read_i8 v1, v1 offset:1408
ds_read_u16 v86, v52 offset:4608
ds_read_u8 v23, v47 offset:2560
ds_write2_b32 v59, v22, v23 offset0:68 offset1:104
ds_write2_b64 v1, v[6:7], v[8:9] offset0:18 offset1:34
ds_write2st64_b32 v7, v1, v16 offset1:2
ds_write2st64_b64 v9, v[2:3], v[4:5] offset0:1 offset1:2
ds_write_b128 v58, v[28:31]
ds_write_b16 v62, v41 offset:17424
ds_write_b32 v1, v2 offset:12816
ds_write_b64 v33, v[6:7] offset:12304
ds_write_b8 v5, v0 offset:1408
flat_load_dword v6, v[4:5]
flat_load_dwordx2 v[6:7], v[4:5]
flat_load_dwordx4 v[28:31], v[22:23]
flat_load_ubyte v16, v[16:17]
flat_load_ushort v6, v[4:5]
flat_store_dword v[2:3], v4
flat_store_dwordx2 v[4:5], v[6:7]
flat_store_dwordx4 v[4:5], v[6:9]
global_atomic_add v2, v2, v3, s[34:35] sc0
global_load_dword v12, v[4:5], off
global_load_dwordx2 v[12:13], v[4:5], off
global_load_dwordx3 v[6:8], v[4:5], off
global_load_dwordx4 v[8:11], v[0:1], off
global_load_sbyte v6, v[4:5], off offset:-8
global_load_sshort v6, v4, s[2:3]
global_load_ubyte v7, v[8:9], off
global_load_ushort v6, v[4:5], off
global_store_byte v[0:1], v14, off
global_store_dword v[6:7], v8, off
global_store_dwordx2 v[14:15], v[8:9], off
global_store_dwordx3 v[4:5], v[6:8], off
global_store_dwordx4 v[4:5], v[0:3], off
global_store_short v[4:5], v6, off
s_abs_i32 s5, s4
s_add_i32 s6, s6, s3
s_add_u32 s6, s26, s10
s_addc_u32 s7, s27, s11
s_addk_i32 s84, 0x800
s_and_b32 s18, s26, 0x7ffffffe
s_and_b64 s[6:7], s[0:1], vcc
s_and_saveexec_b64 s[0:1], vcc
s_andn2_b32 s0, s0, 31
s_andn2_b64 vcc, exec, s[0:1]
s_andn2_saveexec_b64 s[4:5], s[4:5]
s_ashr_i32 s7, s12, 31
s_ashr_i64 s[0:1], s[0:1], 5
s_barrier
s_bcnt1_i32_b64 s6, s[6:7]
s_bfe_i32 s1, s2, s3
s_bfe_u32 s1, s2, 0x80010
s_bfm_b32 s1, s2, s3
s_bitcmp0_b32 s6, 0
s_bitcmp1_b32 s0, 0
s_branch 4
s_brev_b32 s0, 32
s_cbranch_execnz 4
s_cbranch_execz 4
s_cbranch_scc0 4
s_cbranch_scc1 4
s_cbranch_vccnz 4
s_cbranch_vccz 4
s_cmp_eq_i32 s2, s3
s_cmp_eq_u32 s6, 2
s_cmp_eq_u64 s[14:15], 0
s_cmp_ge_i32 s72, s84
s_cmp_ge_u32 s6, s5
s_cmp_gt_i32 s12, -1
s_cmp_gt_u32 s26, 7
s_cmp_le_i32 s84, s14
s_cmp_le_u32 s2, -16
s_cmp_lg_i32 s2, s3
s_cmp_lg_u32 s78, 1
s_cmp_lg_u64 s[16:17], 0
s_cmp_lt_i32 s26, 1
s_cmp_lt_u32 s26, 4
s_cmpk_eq_i32 s1, 0x10
s_cmpk_eq_u32 s1, 0x10
s_cmpk_ge_i32 s1, 0x10
s_cmpk_ge_u32 s1, 0x10
s_cmpk_gt_i32 s1, 0x10
s_cmpk_gt_u32 s1, 0x10
s_cmpk_le_i32 s1, 0x10
s_cmpk_le_u32 s1, 0x10
s_cmpk_lg_i32 s1, 0x10
s_cmpk_lg_u32 s1, 0x10
s_cmpk_lt_i32 s1, 0x10
s_cmpk_lt_u32 s1, 0x10
s_cselect_b32 s20, 2, 1
s_cselect_b64 s[0:1], -1, 0
s_endpgm
s_ff1_i32_b32 s0, s1
s_ff1_i32_b64 s1, s[2:3]
s_flbit_i32_b32 s1, s2
s_getpc_b64 s[2:3]
s_load_dword s6, s[4:5], 0x50
s_load_dwordx16 s[16:31], s[0:1], 0x70
s_load_dwordx2 s[0:1], s[4:5], 0x48
s_load_dwordx4 s[0:3], s[4:5], 0x8
s_load_dwordx8 s[12:19], s[4:5], 0x28
s_lshl1_add_u32 s1, s2, s3
s_lshl2_add_u32 s22, s86, 0x68d0
s_lshl3_add_u32 s15, s14, s76
s_lshl4_add_u32 s1, s2, s3
s_lshl_b32 s85, s15, 4
s_lshl_b64 s[6:7], s[6:7], 2
s_lshr_b32 s8, s8, 27
s_lshr_b64 s[2:3], s[8:9], 30
s_max_i32 s1, s2, s3
s_max_u32 s1, s2, s3
s_min_i32 s61, s1, s0
s_min_u32 s1, s2, s3
s_mov_b32 s7, 0
s_mov_b64 s[2:3], 0
s_movk_i32 s6, 0x240
s_mul_hi_i32 s1, s2, s3
s_mul_hi_u32 s3, s6, s3
s_mul_i32 s0, s7, 0x240
s_mulk_i32 s1, 0x10
s_nand_b64 s[2:3], s[4:5], s[6:7]
s_nop 0
s_nor_b64 s[94:95], vcc, s[24:25]
s_not_b32 s1, s2
s_not_b64 s[2:3], s[4:5]
s_or_b32 s0, s1, s0
s_or_b64 exec, exec, s[0:1]
s_or_saveexec_b64 s[0:1], s[0:1]
s_orn2_b32 s1, s2, s3
s_orn2_b64 s[74:75], s[74:75], exec
s_pack_hh_b32_b16 s1, s2, s3
s_pack_lh_b32_b16 s1, s2, s3
s_pack_ll_b32_b16 s1, s2, s3
s_setprio 1
s_sext_i32_i16 s1, s2
s_sext_i32_i8 s1, s2
s_sleep 1
s_sub_i32 s3, 0, s5
s_sub_u32 s12, s3, s6
s_subb_u32 s13, s9, s7
s_waitcnt lgkmcnt(0)
s_xnor_b64 s[2:3], s[4:5], s[6:7]
s_xor_b32 s4, s3, 0x80000000
s_xor_b64 s[0:1], exec, s[4:5]
s_xor_saveexec_b64 s[2:3], s[4:5]
v_add3_u32 v1, v2, v1, v3
v_add_co_u32_e32 v4, vcc, s0, v4
v_add_co_u32_e64 v16, s[0:1], v23, v17
v_add_f32_dpp v1, v2, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
v_add_f32_e32 v14, 0x46800000, v15
v_add_f32_e64 v33, |v9|, v11
v_add_f64 v[2:3], v[4:5], v[6:7]
v_add_lshl_u32 v6, v24, v30, 2
v_add_u16_e32 v1, v2, v3
v_add_u32_e32 v8, 0x3fffffff, v8
v_add_u32_e64 v6, s99, 8
v_add_u32_sdwa v125, v14, v66 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD
v_addc_co_u32_e32 v5, vcc, v1, v5, vcc
v_addc_co_u32_e64 v17, s[0:1], 0, 0, s[0:1]
v_alignbit_b32 v0, v3, v2, 31
v_alignbyte_b32 v1, v2, v3, v4
v_and_b32_e32 v18, 31, v0
v_and_b32_sdwa v16, v11, v15 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD
v_and_or_b32 v9, v9, s1, v11
v_ashrrev_i32_e32 v13, 31, v12
v_ashrrev_i64 v[2:3], 1, v[2:3]
v_bcnt_u32_b32 v5, v4, 0
v_bfe_i32 v8, v8, 7, 1
v_bfe_u32 v17, v8, 16, 15
v_bfi_b32 v79, v26, 0, s83
v_bfrev_b32_e32 v4, 1
v_ceil_f32_e32 v1, v2
v_cmp_class_f64_e32 vcc, v[10:11], v37
v_cmp_eq_f32_e32 vcc, 0, v8
v_cmp_eq_f32_e64 s[0:1], 0, v22
v_cmp_eq_i16_e32 vcc, v2, v3
v_cmp_eq_i32_e32 vcc, v2, v3
v_cmp_eq_i64_e32 vcc, v[2:3], v[4:5]
v_cmp_eq_u16_e32 vcc, v2, v3
v_cmp_eq_u32_e32 vcc, 8, v18
v_cmp_eq_u32_e32 vcc, v2, v3
v_cmp_eq_u32_e64 s[2:3], 8, v32
v_cmp_eq_u64_e32 vcc, 0, v[28:29]
v_cmp_eq_u64_e32 vcc, v[2:3], v[4:5]
v_cmp_eq_u64_e64 s[18:19], v[6:7], v[14:15]
v_cmp_ge_f32_e32 vcc, s20, v26
v_cmp_ge_f32_e64 s[20:21], s14, v25
v_cmp_ge_i16_e32 vcc, v2, v3
v_cmp_ge_i32_e32 vcc, s15, v32
v_cmp_ge_i32_e32 vcc, v2, v3
v_cmp_ge_i32_e64 s[4:5], v6, v31
v_cmp_ge_i64_e32 vcc, s[66:67], v[26:27]
v_cmp_ge_i64_e32 vcc, v[2:3], v[4:5]
v_cmp_ge_i64_e64 s[0:1], v[2:3], v[0:1]
v_cmp_ge_u16_e32 vcc, v2, v3
v_cmp_ge_u32_e32 vcc, v2, v3
v_cmp_ge_u32_e64 s[0:1], s12, v16
v_cmp_ge_u64_e32 vcc, v[2:3], v[4:5]
v_cmp_gt_f32_e32 vcc, s4, v18
v_cmp_gt_f32_e64 s[60:61], s69, 0
v_cmp_gt_i16_e32 vcc, v2, v3
v_cmp_gt_i32_e32 vcc, s3, v2
v_cmp_gt_i32_e32 vcc, v2, v3
v_cmp_gt_i32_e64 s[0:1], s67, v2
v_cmp_gt_i64_e32 vcc, s[0:1], v[2:3]
v_cmp_gt_i64_e32 vcc, v[2:3], v[4:5]
v_cmp_gt_i64_e64 s[0:1], s[2:3], v[12:13]
v_cmp_gt_u16_e32 vcc, v2, v3
v_cmp_gt_u32_e32 vcc, s6, v16
v_cmp_gt_u32_e32 vcc, v2, v3
v_cmp_gt_u32_e64 s[2:3], s2, v17
v_cmp_gt_u64_e32 vcc, s[8:9], v[16:17]
v_cmp_gt_u64_e32 vcc, v[2:3], v[4:5]
v_cmp_le_f32_e32 vcc, v27, v137
v_cmp_le_f32_e64 s[18:19], 1.0, v25
v_cmp_le_i16_e32 vcc, v2, v3
v_cmp_le_i32_e32 vcc, s74, v23
v_cmp_le_i32_e32 vcc, v2, v3
v_cmp_le_i32_e64 s[12:13], s79, v18
v_cmp_le_i64_e32 vcc, s[38:39], v[2:3]
v_cmp_le_i64_e32 vcc, v[2:3], v[4:5]
v_cmp_le_i64_e64 s[0:1], s[12:13], v[6:7]
v_cmp_le_u16_e32 vcc, v2, v3
v_cmp_le_u32_e32 vcc, s24, v20
v_cmp_le_u32_e32 vcc, v2, v3
v_cmp_le_u32_e64 s[2:3], s5, v4
v_cmp_le_u64_e32 vcc, v[2:3], v[4:5]
v_cmp_lg_f32_e32 vcc, s31, v23
v_cmp_lt_f32_e32 vcc, s0, v9
v_cmp_lt_f32_e64 s[2:3], v8, -s0
v_cmp_lt_i16_e32 vcc, v2, v3
v_cmp_lt_i32_e32 vcc, -1, v6
v_cmp_lt_i32_e32 vcc, v2, v3
v_cmp_lt_i32_e64 s[0:1], v3, v46
v_cmp_lt_i64_e32 vcc, -1, v[12:13]
v_cmp_lt_i64_e32 vcc, v[2:3], v[4:5]
v_cmp_lt_i64_e64 s[0:1], -1, v[2:3]
v_cmp_lt_u16_e32 vcc, v2, v3
v_cmp_lt_u32_e32 vcc, s2, v17
v_cmp_lt_u32_e32 vcc, v2, v3
v_cmp_lt_u32_e64 s[0:1], s0, v17
v_cmp_lt_u64_e32 vcc, v[2:3], v[4:5]
v_cmp_lt_u64_e64 s[6:7], s[18:19], v[42:43]
v_cmp_ne_i16_e32 vcc, v2, v3
v_cmp_ne_i32_e32 vcc, v2, v3
v_cmp_ne_i64_e32 vcc, v[2:3], v[4:5]
v_cmp_ne_u16_e32 vcc, v2, v3
v_cmp_ne_u16_sdwa vcc, v0, v18 src0_sel:BYTE_0 src1_sel:DWORD
v_cmp_ne_u32_e32 vcc, s2, v23
v_cmp_ne_u32_e32 vcc, v2, v3
v_cmp_ne_u32_e64 s[2:3], 1, v0
v_cmp_ne_u64_e32 vcc, 0, v[22:23]
v_cmp_ne_u64_e32 vcc, v[2:3], v[4:5]
v_cmp_ne_u64_e64 s[14:15], 0, v[22:23]
v_cmp_neq_f32_e32 vcc, s83, v14
v_cmp_neq_f32_e64 s[24:25], s2, v7
v_cmp_nge_f32_e32 vcc, v2, v3
v_cmp_ngt_f32_e32 vcc, s67, v56
v_cmp_ngt_f32_e64 s[8:9], s97, v13
v_cmp_nle_f32_e32 vcc, v2, v3
v_cmp_nlg_f32_e64 s[2:3], v2, |v3|
v_cmp_nlt_f32_e32 vcc, s2, v14
v_cmp_o_f32_e32 vcc, v6, v6
v_cmp_o_f32_e64 s[14:15], v30, v30
v_cmp_u_f32_e32 vcc, v5, v5
v_cndmask_b32_e32 v15, 0, v13, vcc
v_cndmask_b32_e64 v8, v22, -v32, s[2:3]
v_cndmask_b32_sdwa v17, v8, v17, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1
v_cvt_f16_f32_e32 v12, v6
v_cvt_f16_f32_sdwa v12, v16 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD
v_cvt_f32_f16_e32 v36, v20
v_cvt_f32_f16_sdwa v16, v8 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1
v_cvt_f32_f64_e32 v10, v[64:65]
v_cvt_f32_i32_e32 v1, v2
v_cvt_f32_u32_e32 v1, s5
v_cvt_f32_ubyte0_e32 v17, v18
v_cvt_f32_ubyte1_e32 v1, v2
v_cvt_f32_ubyte2_e32 v1, v2
v_cvt_f32_ubyte3_e32 v1, v2
v_cvt_f64_f32_e32 v[10:11], v10
v_cvt_i32_f32_e32 v9, v10
v_cvt_pk_f32_fp8_sdwa v[24:25], v23 src0_sel:WORD_1
v_cvt_pk_f32_fp8_sdwa v[32:33], v25 src0_sel:WORD_1
v_cvt_pkrtz_f16_f32 v25, v24, v25
v_cvt_u32_f32_e32 v1, v1
v_div_fixup_f32 v16, v13, v12, 1.0
v_div_fmas_f32 v13, v13, v16, v22
v_div_scale_f32 v13, s[2:3], v12, v12, 1.0
v_exp_f32_e32 v14, v14
v_ffbh_u32_e32 v0, v10
v_ffbl_b32_e32 v1, v2
v_floor_f32_e32 v1, v2
v_fma_f32 v17, -v13, v16, 1.0
v_fma_f64 v[10:11], v[10:11], v[64:65], 1.0
v_fma_mix_f32 v6, v27, v28, v6 op_sel_hi:[0,1,0]
v_fmaak_f32 v134, v134, v26, 0x3c1d955b
v_fmac_f32_e32 v16, v17, v16
v_fmac_f64_e32 v[64:65], v[66:67], v[10:11]
v_fmamk_f32 v1, v2, 0x4f800000, v1
v_ldexp_f32 v8, v8, v9
v_log_f32_e32 v2, v22
v_lshl_add_u32 v14, v32, 4, s2
v_lshl_add_u64 v[4:5], v[2:3], 2, s[2:3]
v_lshl_or_b32 v8, v8, 16, v11
v_lshlrev_b16_e32 v1, v2, v3
v_lshlrev_b32_e32 v19, 4, v18
v_lshlrev_b32_e64 v2, v26, -1
v_lshlrev_b32_sdwa v8, v16, v14 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1
v_lshlrev_b64 v[4:5], 2, v[2:3]
v_lshrrev_b16_e32 v1, v2, v3
v_lshrrev_b32_e32 v1, 5, v0
v_lshrrev_b64 v[4:5], v3, vcc
v_mad_i32_i24 v9, v75, s21, v103
v_mad_i64_i32 v[2:3], vcc, v4, v5, v[6:7]
v_mad_u32_u24 v1, v1, s6, v5
v_mad_u64_u32 v[0:1], s[0:1], v14, s14, v[4:5]
v_max3_f32 v14, v14, v23, v66
v_max3_i32 v15, v4, v11, 0
v_max3_u32 v1, v2, v3, v4
v_max_f32_e32 v24, v24, v24
v_max_i32_e32 v30, 0x72, v8
v_max_u32_e32 v21, v16, v17
v_max_u32_sdwa v18, v18, v19 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
v_mbcnt_hi_u32_b32 v17, -1, v17
v_mbcnt_lo_u32_b32 v17, -1, 0
v_med3_i32 v1, s1, 1, 4
v_med3_u32 v1, v2, v3, v4
v_mfma_f32_16x16x16_bf16 v[6:9], v[74:75], v[24:25], v[6:9]
v_mfma_f32_16x16x16_f16 v[6:9], v[74:75], v[24:25], v[6:9]
v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], 0
v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], v[0:15]
v_min3_f32 v1, v2, v3, v4
v_min_f32_e32 v203, 1.0, v202
v_min_i32_e32 v2, s3, v2
v_min_u32_e32 v15, 0x43e00000, v17
v_mov_b32_dpp v1, v2 row_ror:8 row_mask:0xf bank_mask:0xf
v_mov_b32_e32 v3, s7
v_mov_b64_e32 v[0:1], s[12:13]
v_mul_f32_e32 v11, 0x3800000, v11
v_mul_f32_e64 v16, v60, v64
v_mul_f64 v[10:11], v[10:11], -v[64:65]
v_mul_hi_i32 v1, v2, v3
v_mul_hi_u32 v16, v14, s14
v_mul_hi_u32_u24_e32 v1, v2, v3
v_mul_i32_i24_e32 v9, 0xffffff74, v35
v_mul_lo_u16_e32 v19, 36, v102
v_mul_lo_u32 v2, v0, s14
v_mul_u32_u24_e32 v4, 0x500, v3
v_mul_u32_u24_sdwa v8, v17, s88 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:DWORD
v_nop
v_not_b32_e32 v48, v0
v_or3_b32 v5, v5, v4, v6
v_or_b32_e32 v2, s6, v1
v_or_b32_sdwa v18, v18, v19 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
v_perm_b32 v10, v10, v86, s84
v_pk_add_f32 v[28:29], v[24:25], v[26:27]
v_pk_add_u16 v1, v2, v3
v_pk_fma_f32 v[24:25], v[28:29], v[12:13], v[24:25] op_sel_hi:[1,0,1] neg_lo:[0,0,1] neg_hi:[0,0,1]
v_pk_mov_b32 v[0:1], s[16:17], s[16:17] op_sel:[0,1]
v_pk_mul_f32 v[8:9], v[10:11], v[22:23] op_sel_hi:[0,1]
v_pk_mul_lo_u16 v14, v14, s21 op_sel_hi:[1,0]
v_rcp_f32_e32 v16, v13
v_rcp_iflag_f32_e32 v1, v1
v_readfirstlane_b32 s6, v1
v_readlane_b32 s34, v227, 2
v_rndne_f32_e32 v10, v8
v_rsq_f32_e32 v1, v2
v_rsq_f64_e32 v[64:65], v[10:11]
v_sqrt_f32_e64 v1, -v2
v_sub_co_u32_e32 v6, vcc, v12, v4
v_sub_co_u32_e64 v20, s[0:1], v2, v20
v_sub_f32_e32 v11, v33, v11
v_sub_u16_e32 v13, v13, v19
v_sub_u32_e32 v10, 0x7f000000, v8
v_sub_u32_e64 v5, v5, 1 clamp
v_subb_co_u32_e32 v7, vcc, v13, v5, vcc
v_subb_co_u32_e64 v1, s[0:1], v3, v1, s[0:1]
v_subbrev_co_u32_e32 v33, vcc, 0, v51, vcc
v_subbrev_co_u32_e64 v3, s[6:7], 0, v1, s[6:7]
v_subrev_co_u32_e32 v26, vcc, s56, v12
v_subrev_co_u32_e64 v94, s[10:11], s10, v0
v_subrev_f32_e32 v1, v2, v3
v_subrev_u32_e32 v8, s0, v30
v_swap_b32 v1, v2
v_trunc_f32_e32 v2, v2
v_writelane_b32 v227, s14, 0
v_xad_u32 v1, v6, -1, s64
v_xnor_b32_e32 v1, v2, v3
v_xor_b32_e32 v17, 4, v21

.ifdef GFX950
v_bitop3_b32 v104, v80, 30, v10 bitop3:0xe0
v_cvt_pk_bf16_f32 v1, v2, v3
v_cvt_pk_f16_f32 v24, v28, v30
v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]
v_mfma_f32_16x16x32_f16 v[0:3], v[4:7], v[8:11], v[0:3]
.endif

.ifdef GFX90A
v_mfma_f32_16x16x16bf16_1k v[6:9], v[26:27], v[30:31], v[6:9]
.endif
