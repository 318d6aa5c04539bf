// Runs llama.cpp for test_llama_cpp.py, which builds this with its headers and libraries (in LIBRARIES):
// MODEL.gguf NUM_FIRST TOKEN... -> logits after each token, float32 [tokens, vocabulary] on stdout. The first NUM_FIRST
// tokens are computed together, the others one by one, with keys and values in float32.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

bool compute(llama_context* context, const std::vector<llama_token>& tokens, int vocabulary, int first, int count) {
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int at = 0; at < count; at++) {
        batch.token[at] = tokens[static_cast<size_t>(first + at)];
        batch.pos[at] = first + at;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = 0;
        batch.logits[at] = 1;
    }
    bool done = llama_decode(context, batch) == 0;
    for (int at = 0; done && at < count; at++) {
        const float* logits = llama_get_logits_ith(context, at);
        fwrite(logits, sizeof(float), static_cast<size_t>(vocabulary), stdout);
    }
    llama_batch_free(batch);
    return done;
}

int logits(const char* path, int num_first, const std::vector<llama_token>& tokens) {
    llama_model* model = llama_model_load_from_file(path, llama_model_default_params());
    if (model == nullptr) return 1;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_batch = 256;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context* context = llama_init_from_model(model, params);
    if (context == nullptr) return 1;
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    bool done = compute(context, tokens, vocabulary, 0, num_first);
    for (int at = num_first; done && at < static_cast<int>(tokens.size()); at++)
        done = compute(context, tokens, vocabulary, at, 1);
    llama_free(context);
    llama_model_free(model);
    return done ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    llama_backend_init();
    if (ggml_backend_dev_count() == 0) ggml_backend_load_all_from_path(LIBRARIES);  // of builds for several CPUs
    if (argc < 4) return 2;
    std::vector<llama_token> tokens;
    for (int at = 3; at < argc; at++) tokens.push_back(atoi(argv[at]));
    return logits(argv[1], atoi(argv[2]), tokens);
}
