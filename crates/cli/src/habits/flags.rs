//! The flags of llama.cpp, vLLM and Ollama, and what becomes of each.
//!
//! Invariant: a flag has one row. Knows nothing of how command lines are read.

use super::Fate::{self, Idle, IdleSwitch, IdleValue, Is, Refused};

const TEMPLATE: &str = "a chat template is always a Jinja template of the model";
const MAPPED: &str = "model files are always mapped, and the pages of weights that --repack copies are \
                      given back";
const LOG: &str = "CELLAR_LOG=debug writes a log";
const THREADS: &str = "-t is for prompts and generation";
const ADAPTERS: &str = "adapters are used as their files are";
const IMAGES: &str = "'cellar run' and 'cellar chat' take --image, --audio and --mmproj; in requests, pictures and \
                      sounds are parts of messages";
const PARTS: &str = "one GPU is used whole, or with the CPU: --gpu-layers sets how many layers it \
                     computes, --backend which one";
const PROMPT_CACHE: &str = "'--save-state FILE' and '--load-state FILE' keep what was read";
const PAGE: &str =
    "GET / always shows browsers the memory and a chat, and has no settings of its own";
const SERVED: &str = "'cellar serve' always has it";
const DOWNLOADS: &str = "only 'cellar pull OWNER/NAME:QUANT' downloads, and -m takes the same name";
const THREAD_PLACES: &str = "threads run where the system puts them";
const DRAFTS: &str = "a draft model computes as the model does, on its threads and its backend";
const SPECULATION: &str = "'--speculate lookup' finds drafts in the text itself, '--speculate draft \
                           --draft-model FILE' with a model, '--draft-model FILE' alone with a head \
                           of EAGLE-3; '--draft-max N' is how many tokens at most";
const SHARED_STEPS: &str = "requests always share the steps and the memory";
const THINKING: &str = "the chat template decides whether a model thinks: requests say it with \
                        'chat_template_kwargs' or 'reasoning_effort', --reasoning-budget N ends it, and \
                        --show-thinking shows it";
const TOOLS: &str =
    "the chat template has the form of calls; clients run the tools, the server does not";
const WEB: &str = "'cellar serve' has --allow-origin ORIGIN for web pages, --tls-cert and --tls-key for TLS; for \
                   other paths put a proxy in front";
const SCORES: &str =
    "'cellar perplexity' and 'cellar kl' measure models; there are no question sets";
const OTHER_PROGRAMS: &str =
    "there is no such program here: models are run, served, measured and converted";
const CACHE: &str = "what prompts share is kept and found again by itself: --prefix-memory SIZE limits it, \
                     --cache-dir DIR keeps it over a restart";
const FITTED: &str =
    "'cellar plan MODEL' computes what fits; layers beyond a GPU's memory stay on the CPU";
const PRESETS: &str =
    "models are named one by one: 'cellar pull OWNER/NAME:QUANT', then -m OWNER/NAME:QUANT";
const SEVERAL_GPUS: &str =
    "one GPU computes: --gpu-layers sets the number of layers, --memory the memory";
const WEIGHTS: &str = "weights have the types of the model's file: 'cellar convert' makes others";
pub(super) const ONE_MODEL: &str = "a chat is 'cellar chat', one answer is 'cellar run'";

/// Flags of other programs by name, with a space between those for the same. `*` stands for any
/// end.
pub(super) const FLAGS: &[(&str, Fate)] = &[
    ("-sys --system-prompt", Is("--system")),
    ("-ngl", Is("--gpu-layers")),
    ("-ub", Is("--ubatch")),
    ("-ctk --cache-type-k", Is("--kv-type-k")),
    ("-ctv --cache-type-v", Is("--kv-type-v")),
    ("-hf -hfr --hf-repo", Is("--model")),
    ("-s", Is("--seed")),
    ("-np", Is("--parallel")),
    ("-md --model-draft --spec-draft-model", Is("--draft-model")),
    ("--draft --draft-n", Is("--draft-max")),
    ("-j -jf", Is("--schema")),
    ("--grammar-file", Is("--grammar")),
    ("-r --reverse-prompt", Is("--stop")),
    ("-cnv --conversation", Is("--chat")),
    ("-no-cnv --no-conversation", Is("--raw")),
    ("--no-display-prompt", Is("--no-echo")),
    ("-a", Is("--alias")),
    ("--no-perf", Is("--quiet")),
    (
        "-fa --flash-attn",
        IdleSwitch("attention is always computed in one step, unless --attention is plain"),
    ),
    ("--jinja --no-jinja", Idle(TEMPLATE)),
    ("--mmap --no-mmap", Idle(MAPPED)),
    ("--mlock --direct-io -dio --check-tensors", Idle(MAPPED)),
    (
        "-v --verbose --log-verbose --log-prefix --log-timestamps --no-log-prefix \
            --no-log-timestamps --no-log-jsonl --no-show-timings --disable-log-requests \
            --disable-log-stats --disable-uvicorn-access-log --enable-log-requests",
        Idle(LOG),
    ),
    (
        "-lv --verbosity --log-verbosity --log-file --log-colors --uvicorn-log-level",
        IdleValue(LOG),
    ),
    ("--log-disable --perf --simple-io --show-timings", Idle(LOG)),
    ("-co --color", IdleSwitch("colours are for terminals alone")),
    ("-tb --threads-batch", IdleValue(THREADS)),
    (
        "-C -Cr -Cb -Crb --cpu-mask --cpu-range --cpu-mask-batch --cpu-range-batch \
            --cpu-strict --cpu-strict-batch --prio --prio-batch --poll --poll-batch --numa",
        IdleValue(THREAD_PLACES),
    ),
    (
        "-Cd -Crd -Cbd -Crbd -td -tbd -ngld --threads-draft --threads-batch-draft \
            --cpu-mask-draft --cpu-range-draft --cpu-strict-draft --cpu-mask-batch-draft \
            --cpu-range-batch-draft --cpu-strict-batch-draft --prio-draft --prio-batch-draft \
            --poll-draft --poll-batch-draft --gpu-layers-draft --n-gpu-layers-draft \
            --spec-draft-threads --spec-draft-threads-batch --spec-draft-cpu-mask \
            --spec-draft-cpu-mask-batch --spec-draft-cpu-range --spec-draft-cpu-range-batch \
            --spec-draft-cpu-strict --spec-draft-cpu-strict-batch --spec-draft-prio \
            --spec-draft-prio-batch --spec-draft-poll --spec-draft-poll-batch --spec-draft-ngl",
        IdleValue(DRAFTS),
    ),
    (
        "-devd -otd -cmoed -ncmoed -ctkd -ctvd --device-draft --override-tensor-draft \
            --cpu-moe-draft --n-cpu-moe-draft --cache-type-k-draft --cache-type-v-draft \
            --spec-draft-device --spec-draft-override-tensor --spec-draft-cpu-moe \
            --spec-draft-n-cpu-moe --spec-draft-ncmoe --spec-draft-type-k --spec-draft-type-v",
        Refused(DRAFTS),
    ),
    (
        "--spec-draft-n-max --num-speculative-tokens",
        Is("--draft-max"),
    ),
    (
        "-hfd -hfrd --hf-repo-draft --spec-draft-hf",
        Is("--draft-model"),
    ),
    (
        "-lcs -lcd --lookup-cache-static --lookup-cache-dynamic --draft-min --draft-n-min \
            --draft-p-min --draft-p-split --mtp --dflash --eagle3 --nextn --spec-* --no-spec-* \
            --speculative-*",
        Refused(SPECULATION),
    ),
    (
        "--warmup --no-warmup",
        Idle("nothing is warmed up but by 'cellar bench'"),
    ),
    ("-st --single-turn", Idle(ONE_MODEL)),
    (
        "-e --escape --no-escape",
        Idle("texts are taken as they are: $'a\\nb' has a line break in most shells"),
    ),
    ("-cb --cont-batching -kvu --kv-unified", Idle(SHARED_STEPS)),
    (
        "-nocb --no-cont-batching",
        Refused("requests always share the steps: --parallel 1 computes one at a time"),
    ),
    (
        "--no-context-shift",
        Idle("nothing is dropped without --context-shift"),
    ),
    (
        "-dt --defrag-thold",
        IdleValue("the memory needs no defragmentation"),
    ),
    (
        "--metrics --props --slots --no-slots --embedding --embeddings --reranking --rerank",
        Idle(SERVED),
    ),
    ("--no-webui --no-ui --webui --ui", Idle(PAGE)),
    (
        "--threads-http -to --timeout --cache-reuse",
        IdleValue("the server needs no such limit"),
    ),
    ("--offline", Idle(DOWNLOADS)),
    (
        "-i --interactive -if --interactive-first -mli --multiline-input",
        Refused(ONE_MODEL),
    ),
    (
        "--image --audio --video --mmproj -mm --mmproj-url -mmu -mmdev",
        Refused(IMAGES),
    ),
    (
        "-sm --split-mode -ts --tensor-split -mg --main-gpu -dev --device -nkvo \
            --no-kv-offload --rpc",
        Refused(PARTS),
    ),
    ("-ot", Is("--override-tensor")),
    ("-cmoe", Is("--cpu-moe")),
    ("-ncmoe", Is("--n-cpu-moe")),
    (
        "--yarn-ext-factor",
        Refused("YaRN is always whole; --rope-scaling linear scales all frequencies alike"),
    ),
    (
        "-sysf --system-prompt-file",
        Refused("--system \"$(cat FILE)\" reads a file in most shells"),
    ),
    ("-l", Is("--logit-bias")),
    ("--temperature", Is("--temp")),
    ("--json-schema --json-schema-file", Is("--schema")),
    ("--in-file", Is("--file")),
    ("--output-file", Is("--out")),
    ("--version", Refused("'cellar --version' prints it")),
    ("-q --quantize", Refused(WEIGHTS)),
    (
        "--task --runner --convert",
        IdleValue("the model's file decides it"),
    ),
    (
        "--config",
        Refused("flags are on the command line; 'cellar serve --config FILE' reads them"),
    ),
    (
        "-O --compilation-config",
        IdleValue("there is nothing to choose"),
    ),
    (
        "--enable-server-load-tracking --enable-prompt-tokens-details",
        Idle(SERVED),
    ),
    ("--headless", Refused(SEVERAL_GPUS)),
    ("--disable-sliding-window", Is("--swa-full")),
    (
        "--max-logprobs",
        IdleValue("requests get at most 20 for each token"),
    ),
    (
        "--scheduling-policy",
        IdleValue("requests come in turn; keys of --api-key-file have a weight"),
    ),
    (
        "--response-role --return-tokens-as-token-ids",
        Refused("answers have the form of OpenAI's API"),
    ),
    (
        "--kv-events-config",
        Refused("'cellar serve --help' has the flags that begin with --kv-events"),
    ),
    (
        "--dimensions",
        Refused("vectors are as long as the model makes them"),
    ),
    (
        "--format",
        Refused("'--schema FILE' holds a text to a JSON schema, and --json reports as JSON"),
    ),
    ("--usage", Refused("--help shows the flags")),
    ("-d --n-depth", Is("--depth")),
    ("--no-parse-special", Is("--no-special")),
    (
        "--no-cache-prompt --no-enable-prefix-caching",
        Is("--no-prefix-cache"),
    ),
    ("-no-kvu --no-kv-unified", Is("--streams")),
    ("--served-model-name", Is("--alias")),
    ("--max-num-seqs", Is("--parallel")),
    ("--max-num-batched-tokens", Is("--step-tokens")),
    (
        "-nr --no-repack",
        Refused("'--repack never' leaves weights as they are in the file"),
    ),
    (
        "-cl --cache-list",
        Refused("'cellar list' lists the downloaded models"),
    ),
    ("--list-devices", Refused("'cellar devices' lists them")),
    (
        "--completion-bash",
        Refused("'cellar completions bash' prints it"),
    ),
    (
        "--server-base",
        Refused("'cellar run' and 'cellar chat' compute themselves, and talk to no server"),
    ),
    (
        "--display-prompt --stdin --parse-special --cache-prompt --enable-prefix-caching \
            --enable-chunked-prefill --async-scheduling --enforce-eager --no-host",
        Idle("it is always so"),
    ),
    (
        "-ptc --print-token-count --sse-ping-interval --max-seq-len-to-capture --block-size",
        IdleValue("there is nothing to choose"),
    ),
    (
        "--ids --show-count",
        Refused("--json gives the ids of the tokens as a list"),
    ),
    (
        "--dtype --quantization --load-format --model-impl",
        Refused(WEIGHTS),
    ),
    (
        "--kv-cache-dtype",
        Refused("'--kv-type q8_0' is the type of K and V; 'cellar serve --help' lists all"),
    ),
    (
        "--trust-remote-code",
        Idle("no code of a model is ever run"),
    ),
    (
        "--revision --download-dir --tokenizer --tokenizer-mode --hf-overrides \
            --generation-config --override-generation-config --hf-config-path",
        Refused("a model is taken as its files are; 'cellar pull' keeps them in $HF_HUB_CACHE"),
    ),
    (
        "--tool-call-parser --reasoning-parser --chat-template-content-format",
        IdleValue("the chat template says it"),
    ),
    (
        "--enable-auto-tool-choice --enable-reasoning",
        Idle("it is always so"),
    ),
    (
        "--save-cache-every",
        IdleValue("cached prefixes are stored as soon as there is nothing else to do"),
    ),
    (
        "--guided-decoding-backend --structured-outputs-config",
        IdleValue("requests with a schema or a grammar are always held to it"),
    ),
    (
        "--gpu-memory-utilization --tensor-parallel-size -tp --pipeline-parallel-size -pp \
            --data-parallel-size -dp --enable-expert-parallel --distributed-executor-backend \
            --api-server-count",
        Refused(SEVERAL_GPUS),
    ),
    (
        "--swap-space --cpu-offload-gb --kv-transfer-config --kv-offloading-size",
        Refused(
            "'--swap-memory 4G' and '--swap-disk 20G' keep preempted requests, and layers beyond a GPU's memory stay on the CPU",
        ),
    ),
    (
        "--limit-mm-per-prompt --mm-processor-kwargs --image-* --video-* --mmproj-* \
            --no-mmproj* --mtmd-*",
        Refused(IMAGES),
    ),
    (
        "--enable-lora --max-loras --max-lora-rank --max-cpu-loras",
        IdleValue("--lora and --lora-modules are all that adapters need"),
    ),
    (
        "--lora-init-without-apply",
        Refused("'--lora FILE=0' loads an adapter for the requests that name it"),
    ),
    (
        "--lora-base --lora-dtype --lora-extra-vocab-size --lora-target-modules",
        Refused(ADAPTERS),
    ),
    ("--ssl-cert-file --ssl-certfile", Is("--tls-cert")),
    ("--ssl-key-file --ssl-keyfile", Is("--tls-key")),
    (
        "--allowed-origins --allow-credentials --ssl-* --root-path --api-prefix --cors-* \
            --no-cors-* --path --media-path --reuse-port",
        Refused(WEB),
    ),
    ("--ui-* --no-ui-* --webui-* --no-webui-*", Refused(PAGE)),
    (
        "--tools --tools-runtime --mcp-* -ag --agent -no-ag --no-agent",
        Refused(TOOLS),
    ),
    (
        "--reasoning* -rea --no-reasoning* --chat-template-kwargs --think --hidethinking \
            --skip-chat-parsing --no-skip-chat-parsing",
        Refused(THINKING),
    ),
    ("--prefill-assistant", Idle(SERVED)),
    (
        "--no-prefill-assistant",
        Refused("a last message of the assistant's is always continued"),
    ),
    (
        "-sps --slot-prompt-similarity -cram --cache-ram -ctxcp --ctx-checkpoints \
            --swa-checkpoints -cms --checkpoint-min-step --kv-unified-per-slot",
        IdleValue(CACHE),
    ),
    ("--cache-idle-slots --no-cache-idle-slots", Idle(CACHE)),
    (
        "--models-preset --models-max --models-autoload --no-models-autoload --tags",
        Refused("'cellar serve --models DIR --memory SIZE' loads models when they are asked for"),
    ),
    (
        "--embd-gemma-default --fim-qwen-* --gpt-oss-* --vision-gemma-*",
        Refused(PRESETS),
    ),
    (
        "--spm-infill",
        Refused("/infill writes prompts as the model's tokens say"),
    ),
    ("-bs --backend-sampling", Idle("samplers run on the CPU")),
    (
        "-kvo --kv-offload --op-offload --no-op-offload",
        Idle("K and V are where their layers are computed"),
    ),
    ("-lm --load-mode -lzm --lazy-mode", IdleValue(MAPPED)),
    ("-ncffn --n-cpu-ffn", Refused(PARTS)),
    (
        "-fit --fit -fitp --fit-print -fitt --fit-target -fitc --fit-ctx",
        IdleValue(FITTED),
    ),
    (
        "--hellaswag* --winogrande* --multiple-choice* --kl-divergence* --save-all-logits \
            --ppl-*",
        Refused(SCORES),
    ),
    (
        "-ofreq --output-frequency --save-frequency --output-format --ppl --no-ppl --chunk \
            --from-chunk --show-statistics",
        Refused(
            "'cellar imatrix' writes one file in GGUF form at its end; --chunks N ends it earlier",
        ),
    ),
    (
        "-pps -tgs -npp -ntg -npl -pg -ns --sequences --delay",
        Refused("'cellar bench' takes -p, -n, --depth, --seqs and --clients"),
    ),
    (
        "--embd-normalize",
        Refused("'--normalize unit' or none is the length of vectors"),
    ),
    (
        "--embd-output-format --embd-separator --cls-separator",
        Refused("texts are one per argument or line, and vectors are JSON"),
    ),
    ("--log-jsonl", Idle(LOG)),
    (
        "--log-prompts-dir",
        Refused("texts of requests are not written; --show-text shows them at GET /"),
    ),
    (
        "--keepalive",
        Refused("'cellar serve --idle-unload SECONDS' is for how long a model stays"),
    ),
    (
        "--nowordwrap --insecure --experimental",
        Idle("there is nothing to choose"),
    ),
    (
        "--modelfile --parameters --license --template",
        Refused("'cellar inspect MODEL' shows what is in a model's file"),
    ),
    (
        "--context-file --chunk-size --chunk-separator --junk --pos --positive-file \
            --negative-file --pca-* --method --tts-* --diffusion-visual --diffusion-algorithm \
            --diffusion-alg-temp --diffusion-add-gumbel-noise -lr --learning-rate* -lr-min \
            -decay-epochs -wd --weight-decay -val-split --val-split -epochs --epochs -opt \
            --optimizer --check --save-logits --logits-output-dir --tensor-filter",
        Refused(OTHER_PROGRAMS),
    ),
    ("-gan --grp-attn-n", Is("--group-attention-factor")),
    ("-gaw --grp-attn-w", Is("--group-attention-width")),
    (
        "--prompt-cache --prompt-cache-all --prompt-cache-ro",
        Refused(PROMPT_CACHE),
    ),
    (
        "-mu --model-url -hff --hf-file -hft --hf-token -dr --docker-repo",
        Refused(DOWNLOADS),
    ),
    (
        "--verbose-prompt -sp --special",
        Refused("'cellar tokenize' shows the tokens of a text"),
    ),
    (
        "--samplers --sampler-seq --sampling-seq",
        Refused("samplers have a fixed order: each has a flag that turns it off, see --help"),
    ),
    (
        "--ignore-eos",
        Refused("--min-tokens N is how long a text is at least"),
    ),
    ("-bf --binary-file", Refused("-f FILE reads a text")),
    ("--api-key", Refused("only 'cellar serve' has keys")),
    (
        "--in-prefix --in-suffix --in-prefix-bos",
        Refused("the model's chat template is around messages; --raw leaves it out"),
    ),
    (
        "--dynatemp-range --dynatemp-exp --adaptive-target \
            --adaptive-decay",
        Refused(
            "this sampler is not supported: --temp, --top-nsigma, --top-k, --top-p, --min-p, --typical, XTC, DRY and Mirostat 2 are",
        ),
    ),
];
