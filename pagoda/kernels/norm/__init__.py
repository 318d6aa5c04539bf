"""RMS normalisation, alone and fused with the residual sum."""
