@pytest.mark.parametrize("null", [None, 0.5])
def test_what_vllm_serves_and_refuses(tmp_path, null):
    starts = {"L0.H1": Start(sign=1, tau=1.0, null=null)}
    config = surgery.splice(make_base("mamba2"), Plan(sites=("L0.H1",), starts=starts)).config
    assert vllm_limits.why_not(config) is None
    graft = config.grafts[0]
    assert vllm_limits.columns(config, graft) == config.head_dim + graft["time_step"] + (null is not None)
    assert vllm_limits.head_size(config) >= max(graft["width"], vllm_limits.columns(config, graft))
    assert "nemotron_h" in vllm_limits.why_not(surgery.splice(make_base("mamba2"), LAYERS).config)
    assert vllm_limits.why_not(surgery.splice(make_base("mamba"), HEADS).config)
    bounded = make_base("mamba2", time_step_limit=(0.0, 1.0))
    assert "time step" in vllm_limits.why_not(surgery.splice(bounded, HEADS).config)


ENGINE = os.environ.get("SURGERY_VLLM")  # the Python of an environment with vLLM and this package


@pytest.mark.skipif(ENGINE is None, reason="SURGERY_VLLM names no Python that has vLLM")
@pytest.mark.parametrize(("null", "closed"), [(None, 0.0), (0.6, 0.0), (0.6, 0.02)])
def test_vllm_computes_grafts_at_heads(tmp_path, monkeypatch, null, closed):
    monkeypatch.setattr("surgery.checking.engines.LENGTHS", (1, 24, 190, 7, 100))
    model, tokenizer = surgery.load("checkpoints/tiny-mamba2", dtype="float32")
    sites = {"L0.H1": 1, "L2.H3": -1, "L2.H5": -1}
    starts = {site: Start(sign=sign, tau=1.1, null=null) for site, sign in sites.items()}
    plan = Plan(sites=("L0.H1", "L2.H3,5"), starts=starts, gate=0.8, closed_below=closed)
    hybrid = surgery.splice(model, plan).eval()
    hybrid.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert compare_engine(hybrid, tmp_path, "vllm", Path(str(ENGINE))).holds
