#compdef cloudtrain
# zsh completion for cloudtrain; written by `cloudtrain completion zsh`.
_cloudtrain_completion() {
    local line kind word help
    local -a answer plain part
    (( $+commands[cloudtrain] )) || [[ -x ${(Q)words[1]} ]] || return 1
    answer=("${(@f)$(_CLOUDTRAIN_COMPLETE=zsh ${(Q)words[1]} "${(@Q)words[2,$CURRENT]}" 2>/dev/null)}")
    for line in $answer; do
        IFS=$'\t' read -r kind word help <<< $line
        word=${word//:/\\:}
        case $kind in
            plain) plain+=("$word${help:+:$help}") ;;
            part) part+=("$word${help:+:$help}") ;;
            file) _path_files -f ;;
            dir) _path_files -/ ;;
        esac
    done
    (( $#plain )) && _describe -V 'cloudtrain' plain
    (( $#part )) && _describe -V 'cloudtrain' part -S ''
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _cloudtrain_completion "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
    compdef _cloudtrain_completion cloudtrain
fi
