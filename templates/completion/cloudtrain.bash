# bash completion for cloudtrain; written by `cloudtrain completion bash`.
_cloudtrain_completion() {
    local kind word help
    COMPREPLY=()
    while IFS=$'\t' read -r kind word help; do
        case $kind in
            plain) COMPREPLY+=("$word") ;;
            part) COMPREPLY+=("$word"); compopt -o nospace ;;
            file) compopt -o default ;;
            dir) compopt -o default -o dirnames ;;
        esac
    done < <(_CLOUDTRAIN_COMPLETE=bash COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT COMP_WORDBREAKS=$COMP_WORDBREAKS "$1" 2>/dev/null)
}
complete -o nosort -F _cloudtrain_completion cloudtrain
